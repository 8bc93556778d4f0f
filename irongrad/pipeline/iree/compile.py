"""AssembledModule -> .vmfb: iree-compile, in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import iree.compiler.tools.binaries as iree_binaries
from iree.compiler import ir

from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.mlir.device import cpu_of
from irongrad.mlir.walk import LOOPS, PACKING, bytecode_of, found_in, functions_of, inside, parsed
from irongrad.passes.module.drop_barriers import drop_barriers
from irongrad.passes.module.fuse_elementwise import fuse_elementwise
from irongrad.passes.module.join_executables import join_executables, linking_flags
from irongrad.passes.module.keep_buffers import keep_memory
from irongrad.passes.module.keep_products_apart import keep_products_apart
from irongrad.passes.module.loops_in_place import write_in_place
from irongrad.passes.module.matmul_kernels import lay_out_products
from irongrad.passes.module.pack_before_loops import pack_before_loops
from irongrad.passes.module.place_transients import allocate_apart, lay_out
from irongrad.passes.module.separate_branch_operands import separate_branch_operands
from irongrad.passes.module.share_kernels import share_kernels
from irongrad.passes.module.state_in_place import write_state_in_place
from irongrad.passes.module.update_early import update_early
from irongrad.passes.module.use_microkernels import with_microkernels
from irongrad.pipeline.iree.phases import retarget
from irongrad.pipeline.iree.portable_module import PortableModule
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of
from irongrad.pipeline.iree.report.kernel_operations import Work, work_of
from irongrad.pipeline.iree.report.peak_transients import transients_of
from irongrad.pipeline.iree.report.statistics import STATISTICS, Statistics, read_statistics
from irongrad.runtime.errors import ToolchainError
from irongrad.runtime.manifest import OF_STATE
from irongrad.targets import DATA_TILING, Target
from irongrad.targets.llvm_cpu import LARGEST_STACK, STACK

# Hyperparameters are float64 scalars of the VM, and their arithmetic stays in float64.
_SCALARS = ("--iree-input-demote-f64-to-f32=false", "--iree-vm-target-extension-f64")

# Of constants little is left to compute after constant folding. IREE takes up to a third of its time to its phase
# `flow` to look for that, compile it for the host and run it; a kernel that runs when the module is loaded does.
_CONSTANTS = "--iree-opt-const-eval=false"

COMMON_FLAGS = (*_SCALARS, _CONSTANTS)

_STACK_LIMIT = "exceeded stack allocation limit"
_TILES_OF_UNKNOWN_SIZES = (
    "stack allocation size overflows 64 bits",
    "expected no unbounded stack allocations",
    "no basis element may be statically non-positive",
    _STACK_LIMIT,
)

# Between its passes, where it takes a fifth of the time: what a phase is given is verified in any case.
UNVERIFIED, _UNVERIFIED_PASSES = "--verify=false", "--verify-each=false"

# The last of IREE's phases in which a module is linalg on tensors.
_OPTIMIZED = "global-optimization"

# IREE 3.13.0's phase `stream`, in three: a module's values are memory where the first ends, have lifetimes where the
# second does, and places where the third does. Without changes of ours in between the result is that of `iree-compile
# --compile-to=stream`, to the byte; tests/passes/module/test_place_transients.py and test_in_place.py tell when it no
# longer is.
_RESOURCES = "iree-stream-tensor-transformation-pipeline"
_SCHEDULE = "iree-stream-async-transformation-pipeline,iree-stream-schedule-allocation"
_LOWER = (
    "iree-stream-cmd-transformation-pipeline,iree-stream-optimization-pipeline{optimize-bindings=true},"
    "iree-stream-cleanup-pipeline,symbol-dce,iree-stream-dump-statistics{output-format=csv output-file=-}"
)

# Operators of loops, as MLIR bytecode names them.
_LOOPS = tuple(f"\0{name.removeprefix('scf.')}\0".encode() for name in LOOPS)

# Operations of a kernel, on average, from which on threads are used: about 10 µs of one core. To hand a kernel to the
# threads of IREE 3.13.0's local-task takes 2 to 5 µs, more on a busy machine (docs/benchmarks.md).
_WORTH_THREADS = 2_000_000

# IREE's plugins for devices, by the backend that needs them. A tenth of the compile time goes into the operators of
# their dialects: every pass of every kernel collects its rules anew from all that are loaded.
_DEVICE_PLUGINS = {
    "cuda": "hal_target_cuda",
    "metal": "hal_target_metal_spirv",
    "rocm": "hal_target_rocm",
    "vulkan": "hal_target_vulkan_spirv",
}

# What a portable module is made of: linalg, and torch-mlir's own scatters and sorts. To find that out IREE loads the
# operators of every input that it knows, a tenth of the time to its phase `flow`.
_INPUT = "--iree-input-type=tm_tensor"

# Up to its phase `stream` IREE works on functions side by side. Where one computes and the others hand on the state,
# threads bring nothing, and to set up its passes for each of them is a fifth of the CPU time of these phases.
_WITHOUT_THREADS = "--mlir-disable-threading"


@dataclass(frozen=True)
class CompiledModule:
    """A .vmfb in memory.

    Attributes:
        target: what it was compiled for.
        flags: all flags of iree-compile.
        vmfb: its bytes.
        architecture: the CPU architecture, empty where that does not apply.
        features: the CPU features that the code was allowed to use.
        statistics: what the compiler says of the program.
    """

    target: Target
    flags: tuple[str, ...]
    vmfb: bytes
    architecture: str
    features: tuple[str, ...]
    statistics: Statistics

    @property
    def device(self) -> str:
        """The IREE device that runs it best: without threads where kernels are short. Results are the same bits."""
        work = self.statistics.work
        short = work.operations is not None and work.operations < _WORTH_THREADS * work.launches
        return (short and self.target.serial_device) or self.target.device


# Told the most bytes of intermediate values that each public function allocates; may raise.
Check = Callable[[Mapping[str, int]], None]


def unchecked(transients: Mapping[str, int]) -> None:
    """Take any allocations."""


def compile_module(module: PortableModule, target: Target, scratch: Path, check: Check = unchecked) -> CompiledModule:
    """Compile `module` for `target`.

    Args:
        module: the program.
        target: what to compile it for.
        scratch: where files are left that the phases hand on.
        check: told what the functions allocate, before any kernel is compiled.

    Raises:
        ToolchainError: IREE failed; with its diagnostic, the user's line where known, and the kept module.
    """
    source, output = scratch / "step.mlirbc", scratch / f"step.{target.name}.vmfb"
    source.write_bytes(retarget(module, target))
    flags = (*COMMON_FLAGS, *target.flags)
    threads = threads_for(module)
    while True:
        try:
            allowed = (*flags, *without_plugins(target))
            flow = _compile_to_flow(target, (*allowed, *threads), source)
            with ThreadPoolExecutor(1) as beside:
                reading = beside.submit(_kernels_of, flow)
                stream = _compile_to_stream(target, (*allowed, *threads), source, output)
            with parsed(stream) as module:
                transients, (architecture, features) = transients_of(module), cpu_of(module)
                check(transients)
                edits = _edits_of_stream(target)
                for edit in edits:
                    edit(module)
                if edits:
                    _phase(source, "stream").write_bytes(bytecode_of(module))
                linking = linking_flags(module)
            kernels = reading.result()
            if kernels.packs_booleans and DATA_TILING in flags:
                raise _RefusedError("booleans are packed", DATA_TILING, ())
            compile_kernels = _compile_with_branches if kernels.branches else _compile_directly
            compile_kernels((*allowed, *linking), source, output)
            break
        except _RefusedError as error:
            flags = error.remedied(flags)
    statistics = read_statistics(output.with_name(STATISTICS), transients, kernels.traffic, kernels.work)
    return CompiledModule(target, flags, output.read_bytes(), architecture, features, statistics)


@dataclass(frozen=True)
class _Kernels:
    """What a module says of its kernels after the phase `flow`.

    Attributes:
        traffic: as in `Statistics`, as is the next.
        work: as above.
        branches: as `has_branches` has it.
        packs_booleans: as `packs_booleans` has it.
    """

    traffic: dict[str, int]
    work: Work
    branches: bool
    packs_booleans: bool


def _kernels_of(flow: bytes) -> _Kernels:
    with parsed(flow) as module:
        return _Kernels(traffic_of(module), work_of(module), has_branches(module), packs_booleans(module))


def packs_booleans(flow: ir.Module) -> bool:
    """Whether a kernel with a product reads booleans that are packed as the product's operands are.

    IREE 3.13.0 reads other booleans than were packed ("error 1e+09" for `(x @ w).masked_fill(mask, -1e9)`, for which
    its microkernel was called), or compiles the kernel for more than ten minutes.
    tests/pipeline/iree/test_toolchain.py tells when it no longer does.
    """
    return any("xi1" in str(op.results[0].type) for op in found_in(flow, PACKING))


def has_branches(flow: ir.Module) -> bool:
    """Whether there is structured control flow that hands values on in the functions of a module."""
    return any(op.name.startswith("scf.") and len(op.results) for f in functions_of(flow) for op in inside(f))


def threads_for(module: PortableModule) -> tuple[str, ...]:
    """Flags of the phases that work on whole functions."""
    computing = [entry for entry in module.entry_points if entry.name not in OF_STATE]
    return (_WITHOUT_THREADS,) if len(computing) == 1 else ()


def without_plugins(target: Target) -> tuple[str, ...]:
    """Flags that leave out what IREE has for other devices than the target's."""
    return tuple(f"--iree-plugin=-{p}" for backend, p in _DEVICE_PLUGINS.items() if backend != target.backend)


class _RefusedError(ToolchainError):
    """iree-compile failed, and may not with another flag; the manifest says which were used in the end.

    Attributes:
        flag: the flag.
        remedy: what may serve in its place, if anything.
    """

    def __init__(self, message: str, flag: str, remedy: tuple[str, ...]) -> None:
        super().__init__(message)
        self.flag = flag
        self.remedy = remedy

    def remedied(self, flags: Sequence[str]) -> tuple[str, ...]:
        """`flags` with the remedy."""
        return tuple(new for old in flags for new in (self.remedy if old == self.flag else (old,)))


def _check_remedies(flags: Sequence[str], result: subprocess.CompletedProcess[str]) -> None:
    """Refuse a failure that other flags may help against.

    IREE 3.13.0 ends by a signal with data tiling, though not in every run, on a product of matrices to which something
    made of indices is added and that is then transposed: `(x @ x.mT + torch.eye(n)).mT`. It may refuse its own tiles,
    in one of several ways, for products of which a size is not known; no small module does. Without data tiling the
    code is slower. And it refuses a dispatch whose own tile sizes ask for more stack than a limit.
    tests/pipeline/iree/test_toolchain.py tells when the first or the last is gone.
    """
    failure = f"iree-compile failed with status {result.returncode}"
    if result.returncode > 0 and _STACK_LIMIT in result.stderr and STACK in flags:
        raise _RefusedError(failure, STACK, (LARGEST_STACK,))
    of_tiles = result.returncode < 0 or any(text in result.stderr for text in _TILES_OF_UNKNOWN_SIZES)
    if result.returncode != 0 and of_tiles and DATA_TILING in flags:
        raise _RefusedError(failure, DATA_TILING, ())


def _compile_with_branches(flags: Sequence[str], source: Path, output: Path) -> None:
    """Compile the phase `stream` of a module with branches that hand on values; in between, they are made safe."""
    stream, vm = _phase(source, "stream"), _phase(source, "vm")
    _compile((*flags, "--compile-from=stream", "--compile-to=vm", "--emit-mlir-bytecode"), stream, vm)
    vm.write_bytes(separate_branch_operands(vm.read_bytes()))
    _compile((*flags, "--compile-from=vm"), vm, output)


def _compile_directly(flags: Sequence[str], source: Path, output: Path) -> None:
    _compile((*flags, "--compile-from=stream"), _phase(source, "stream"), output)


def _compile_to_flow(target: Target, flags: Sequence[str], source: Path) -> bytes:
    """The phase that lists the kernels."""
    optimized, flow = _phase(source, _OPTIMIZED), _phase(source, "flow")
    _compile((*flags, _INPUT, f"--compile-to={_OPTIMIZED}", "--emit-mlir-bytecode"), source, optimized)
    tiled = DATA_TILING in flags
    _edit(
        optimized,
        *([lay_out_products] if tiled else []),
        fuse_elementwise,
        *([keep_products_apart] if tiled else []),
    )
    _compile((*flags, f"--compile-from={_OPTIMIZED}", "--compile-to=flow", "--emit-mlir-bytecode"), optimized, flow)
    flow.write_bytes(with_microkernels(flow.read_bytes()))
    _edit(flow, *([share_kernels] if target.shared_kernels else []), pack_before_loops, update_early, drop_barriers)
    return flow.read_bytes()


def _compile_to_stream(target: Target, flags: Sequence[str], source: Path, output: Path) -> bytes:
    """The phase that allocates; write the statistics."""
    flow, resources, scheduled, stream = (_phase(source, n) for n in ("flow", "resources", "scheduled", "stream"))
    if _has_loops(flow.read_bytes()):
        _transform(_RESOURCES, flags, flow, resources)
        _edit(resources, write_in_place)
        _transform(_SCHEDULE, flags, resources, scheduled)
    else:
        _transform(f"{_RESOURCES},{_SCHEDULE}", flags, flow, scheduled)
    in_place = [write_state_in_place] if target.state_in_place else []
    _edit(scheduled, *in_place, allocate_apart, partial(lay_out, alignment=target.alignment))
    statistics = _transform(_LOWER, flags, scheduled, stream)
    output.with_name(STATISTICS).write_text(statistics)
    return stream.read_bytes()


def _edits_of_stream(target: Target) -> list[Callable[[ir.Module], object]]:
    """What is changed of a module whose allocations are known."""
    edits: list[Callable[[ir.Module], object]] = [join_executables] if target.joined_executables else []
    if target.largest_freed is not None:
        edits.append(partial(keep_memory, least=target.largest_freed))
    return edits


def _has_loops(module: bytes) -> bool:
    return any(name in module for name in _LOOPS)


def _edit(file: Path, *edits: Callable[[ir.Module], None]) -> None:
    """Change the module in `file`."""
    with parsed(file.read_bytes()) as module:
        for edit in edits:
            edit(module)
        file.write_bytes(bytecode_of(module))


def _phase(source: Path, name: str) -> Path:
    """The file of the module `source` as it is after a phase of IREE's compilation."""
    return source.with_suffix(f".{name}.mlirbc")


def _compile(flags: Sequence[str], source: Path, output: Path) -> None:
    arguments = [*flags, str(source), "-o", str(output)]
    _finished("iree-compile", lambda *more: _iree_compile([*more, *arguments]), UNVERIFIED, flags, source)


def _transform(passes: str, flags: Sequence[str], source: Path, output: Path) -> str:
    """Run IREE's `passes` on a module; what they print."""
    threads = [flag for flag in flags if flag == _WITHOUT_THREADS]
    arguments = [
        f"--pass-pipeline=builtin.module({passes})",
        *threads,
        "--emit-bytecode",
        str(source),
        "-o",
        str(output),
    ]
    return _finished("iree-opt", lambda *more: _run("iree-opt", [*more, *arguments]), _UNVERIFIED_PASSES, flags, source)


def _finished(
    tool: str,
    run: Callable[..., subprocess.CompletedProcess[str]],
    unverified: str,
    flags: Sequence[str],
    source: Path,
) -> str:
    """What a tool of IREE's prints, which `run` runs with a flag or with none more."""
    result = run(unverified)
    _check_remedies(flags, result)
    if result.returncode != 0:  # again, for a verifier may say more than what failed on invalid code
        result = run()
        _check_remedies(flags, result)
    if result.returncode != 0:
        raise toolchain_error(tool, result, source)
    return result.stdout


def _iree_compile(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return _run("iree-compile", arguments)


def _run(tool: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([iree_binaries.find_tool(tool), *arguments], capture_output=True, text=True, check=False)
