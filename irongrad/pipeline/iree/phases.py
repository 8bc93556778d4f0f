"""The passes over IREE's module: one table in the order in which they run, and one loop over it.

`compile.py` brings the module to a phase with IREE's own tools. `run_phase` then runs our passes on the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from iree.compiler import ir

from irongrad.analysis.timeline import noted
from irongrad.mlir.walk import bytecode_of, parsed
from irongrad.passes.base import PassResult
from irongrad.passes.module.allocate_apart import AllocateApart
from irongrad.passes.module.attention_kernels import AttentionKernels
from irongrad.passes.module.channels_last import ChannelsLast
from irongrad.passes.module.check_device import CheckDevice
from irongrad.passes.module.compute_before_loops import ComputeBeforeLoops
from irongrad.passes.module.correct_alignments import CorrectAlignments
from irongrad.passes.module.correct_ordinals import CorrectOrdinals
from irongrad.passes.module.depthwise_kernels import DepthwiseKernels
from irongrad.passes.module.draw_at_once import DrawAtOnce
from irongrad.passes.module.drop_barriers import DropBarriers
from irongrad.passes.module.drop_index_checks import DropIndexChecks
from irongrad.passes.module.even_loops import EvenLoops
from irongrad.passes.module.fuse_elementwise import FuseElementwise
from irongrad.passes.module.hide_globals import HideGlobals
from irongrad.passes.module.hide_products import HideProducts
from irongrad.passes.module.hoist_lookups import HoistLookups
from irongrad.passes.module.hold_before_loops import HoldBeforeLoops
from irongrad.passes.module.join_executables import JoinExecutables
from irongrad.passes.module.keep_buffers import KeepBuffers
from irongrad.passes.module.keep_contractions_apart import KeepContractionsApart
from irongrad.passes.module.keep_globals_apart import KeepGlobalsApart
from irongrad.passes.module.keep_operands_apart import KeepOperandsApart
from irongrad.passes.module.keep_packing_apart import KeepPackingApart
from irongrad.passes.module.keep_products_apart import KeepProductsApart
from irongrad.passes.module.keep_reductions_apart import KeepReductionsApart
from irongrad.passes.module.keep_scatters_apart import KeepScattersApart
from irongrad.passes.module.keep_slices_apart import KeepSlicesApart
from irongrad.passes.module.keep_splats_apart import KeepSplatsApart
from irongrad.passes.module.keep_state import KeepState
from irongrad.passes.module.load_where_read import LoadWhereRead
from irongrad.passes.module.loops_in_place import LoopsInPlace
from irongrad.passes.module.map_base import MapBase
from irongrad.passes.module.matmul_kernels import MatmulKernels
from irongrad.passes.module.matmul_kernels.convolutions import ConvolutionKernels
from irongrad.passes.module.matmul_kernels.loops import LoopKernels
from irongrad.passes.module.narrow_integers import NarrowIntegers
from irongrad.passes.module.pack_before_loops import PackBeforeLoops
from irongrad.passes.module.place_transients import PlaceTransients
from irongrad.passes.module.read_before_update import ReadBeforeUpdate
from irongrad.passes.module.round_scalars import RoundScalars
from irongrad.passes.module.scalars_on_host import ScalarsOnHost
from irongrad.passes.module.send_early import SendEarly
from irongrad.passes.module.separate_branch_operands import SeparateBranchOperands
from irongrad.passes.module.share_kernels import ShareKernels
from irongrad.passes.module.specialise_kernels import SpecialiseKernels
from irongrad.passes.module.state_in_place import StateInPlace
from irongrad.passes.module.tile_sums import TileSums
from irongrad.passes.module.update_early import UpdateEarly
from irongrad.passes.module.use_microkernels import UseMicrokernels
from irongrad.passes.module.vector_products import VectorProducts
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.runtime.errors import InternalError, UserError
from irongrad.runtime.suggestion import suggestion


@dataclass(frozen=True)
class Phase:
    """A state of the module in which our passes run.

    Attributes:
        name: the name of the phase, which also appears in the file names of `--dump-dir`.
        reached: the tool that brings the module to the phase.
        passes: the passes that run in the phase, in order.
    """

    name: str
    reached: str
    passes: tuple[type[ModulePass], ...]


ASSEMBLED = Phase("assembled", "assembly, once for all targets", (DropIndexChecks, HoistLookups))
INPUT = Phase("input", "nothing, once per target", (ScalarsOnHost, NarrowIntegers, ChannelsLast, CheckDevice))
GLOBAL_OPTIMIZATION = Phase(
    "global-optimization",
    "iree-compile; the last phase of linalg on tensors",
    (
        LoopKernels,
        AttentionKernels,
        DepthwiseKernels,
        ConvolutionKernels,
        MatmulKernels,
        RoundScalars,
        DrawAtOnce,
        KeepOperandsApart,
        FuseElementwise,
        VectorProducts,
        KeepProductsApart,
        KeepContractionsApart,
        KeepReductionsApart,
        KeepSlicesApart,
        KeepScattersApart,
        HoldBeforeLoops,
    ),
)
FLOW = Phase(
    "flow",
    "iree-compile; the module lists its kernels",
    (
        KeepPackingApart,
        UseMicrokernels,
        ShareKernels,
        PackBeforeLoops,
        UpdateEarly,
        DropBarriers,
        SendEarly,
        ReadBeforeUpdate,
        KeepState,
        EvenLoops,
        LoadWhereRead,
        TileSums,
        HideProducts,
    ),
)
RESOURCES = Phase(
    "resources",
    "iree-opt, for a module with loops; values are buffers",
    (LoopsInPlace, ComputeBeforeLoops, KeepGlobalsApart, KeepSplatsApart),
)
SCHEDULED = Phase(
    "scheduled", "iree-opt; values have lifetimes", (MapBase, StateInPlace, AllocateApart, PlaceTransients)
)
STREAM = Phase(
    "stream",
    "iree-opt; values have places in memory",
    (CorrectAlignments, CorrectOrdinals, HideGlobals, SpecialiseKernels, JoinExecutables, KeepBuffers),
)
VM = Phase("vm", "iree-compile, for a module with branches that pass values on", (SeparateBranchOperands,))

PHASES = (ASSEMBLED, INPUT, GLOBAL_OPTIMIZATION, FLOW, RESOURCES, SCHEDULED, STREAM, VM)

# Called with the phase, the pass, its result, and the module after it.
ModuleObserver = Callable[[Phase, ModulePass, PassResult, ir.Module], None]


def unobserved(phase: Phase, item: ModulePass, result: PassResult, module: ir.Module) -> None:
    """Ignore the pass."""


def module_passes() -> dict[str, type[ModulePass]]:
    """All passes of the table, by name."""
    return {kind.name: kind for phase in PHASES for kind in phase.passes}


def known_module_pass(name: str) -> type[ModulePass]:
    """Find the pass of the table with this name.

    Raises:
        UserError: the table has no such pass.
    """
    known = module_passes()
    if name not in known:
        hint = suggestion(name, known)
        raise UserError(f"there is no pass {name!r} over IREE's module{hint}; the passes are {', '.join(known)}")
    return known[name]


def check_disabled(names: Collection[str]) -> None:
    """Refuse to leave out a pass without which the module would be wrong.

    Raises:
        UserError: `names` contains such a pass.
    """
    for name in names:
        if reason := module_passes()[name].required:
            raise UserError(f"the pass {name!r} cannot be left out where it applies: {reason}")


def passes_of(phase: Phase, context: ModuleContext | None, disabled: Collection[str] = ()) -> Iterator[ModulePass]:
    """The passes of `phase` that apply; all of them if `context` is None, before there is a target."""
    for kind in phase.passes:
        if kind.name not in disabled:
            item = kind() if context is None else kind.of_context(context)
            if context is None or item.applies(context):
                yield item


def run_phase(
    phase: Phase,
    module: ir.Module,
    context: ModuleContext | None,
    disabled: Collection[str] = (),
    observer: ModuleObserver = unobserved,
) -> bool:
    """Run the passes of `phase` on `module` in place, and verify what they leave.

    Args:
        phase: the phase.
        module: the module, which `phase.reached` has brought to the phase.
        context: what the module is compiled for; None before there is a target.
        disabled: names of passes to leave out.
        observer: called after each pass.

    Returns:
        Whether any pass ran.

    Raises:
        InternalError: the module is invalid afterwards.
        UnsupportedOpError: a pass refuses the module.
    """
    ran = list(passes_of(phase, context, disabled))
    run_passes_alone(ran, module, lambda item, result: observer(phase, item, result, module))
    return bool(ran)


def run_passes_alone(
    passes: Sequence[ModulePass],
    module: ir.Module,
    observer: Callable[[ModulePass, PassResult], None] = lambda item, result: None,
) -> None:
    """Run `passes` on `module` in place, whether they apply or not, and verify what they leave.

    Raises:
        InternalError: the module is invalid afterwards.
        UnsupportedOpError: a pass refuses the module.
    """
    with module.context, ir.Location.unknown():
        for item in passes:
            with noted(item.name):
                result = item.run(module)
            observer(item, result)
    if passes and not module.operation.verify():
        names = ", ".join(item.name for item in passes)
        raise InternalError(f"the module does not verify: one of the passes {names} left it invalid")


def run_phase_on_file(
    phase: Phase,
    file: Path,
    context: ModuleContext,
    observer: ModuleObserver = unobserved,
) -> None:
    """Run the passes of `phase` on the module in `file`, which is parsed once and written once."""
    with parsed(file.read_bytes()) as module:
        if run_phase(phase, module, context, context.target.disabled_passes, observer):
            file.write_bytes(bytecode_of(module))
