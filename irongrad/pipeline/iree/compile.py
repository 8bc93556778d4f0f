"""AssembledModule -> .vmfb: IREE's tools, each in its own process, with our passes between IREE's phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from iree.compiler import ir

from irongrad.analysis.records import TargetRecord
from irongrad.mlir.device import cpu_of
from irongrad.mlir.walk import LOOPS, PACKING, bytecode_of, found_in, functions_of, inside, parsed
from irongrad.passes.module.join_executables import linking_flags
from irongrad.passes.module_pass import ModuleContext
from irongrad.pipeline.iree.phases import (
    FLOW,
    GLOBAL_OPTIMIZATION,
    INPUT,
    RESOURCES,
    SCHEDULED,
    STREAM,
    VM,
    ModuleObserver,
    Phase,
    run_phase,
    run_phase_on_file,
    unobserved,
)
from irongrad.pipeline.iree.portable_module import PortableModule
from irongrad.pipeline.iree.remedies import RefusedError
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of
from irongrad.pipeline.iree.report.kernel_operations import Work, work_of
from irongrad.pipeline.iree.report.kernel_table import target_record
from irongrad.pipeline.iree.report.peak_transients import transients_of
from irongrad.pipeline.iree.report.statistics import STATISTICS, Statistics, read_statistics
from irongrad.pipeline.iree.tools import WITHOUT_THREADS, compile_file, transform_file
from irongrad.runtime.manifest import OF_STATE, EntryPoint
from irongrad.targets import DATA_TILING, Target

# Hyperparameters are float64 scalars of the VM, and their arithmetic stays in float64.
_SCALARS = ("--iree-input-demote-f64-to-f32=false", "--iree-vm-target-extension-f64")

# Constant folding leaves few constants to compute. IREE takes up to a third of its time before the phase `flow` to find
# them, compile their computation for the host and run it. Instead, a kernel computes them when the module is loaded.
_CONSTANTS = "--iree-opt-const-eval=false"

COMMON_FLAGS = (*_SCALARS, _CONSTANTS)

# IREE 3.13.0's phase `stream`, in three parts. After the first, a module's values are buffers. After the second, they
# have lifetimes. After the third, they have places in memory. Without our passes in between, the result is identical to
# that of `iree-compile --compile-to=stream`, to the byte; tests/passes/module/test_place_transients.py and
# test_loops_in_place.py tell when it no longer is.
_RESOURCES = "iree-stream-tensor-transformation-pipeline"
_SCHEDULE = "iree-stream-async-transformation-pipeline,iree-stream-schedule-allocation"
_LOWER = (
    "iree-stream-cmd-transformation-pipeline,iree-stream-optimization-pipeline{optimize-bindings=true},"
    "iree-stream-cleanup-pipeline,symbol-dce,iree-stream-dump-statistics{output-format=csv output-file=-}"
)

# IREE copies parameters that nothing stores to a buffer of several, as it does with the others. By default it loads
# each into a buffer of its own. IREE 3.13.0 then fills in the repeated values of a parameter file on one of several
# timelines, which does not wait for the allocations on the others: "transient buffer has not been committed"
# (iree_io_parameter_op_batch_flush in runtime/src/iree/io/parameter_index_provider.c).
# tests/runtime/test_iree_bugs.py tells when it is fixed.
GATHERED = "--iree-stream-resource-memory-model=discrete"

# The names of loop operations as MLIR bytecode encodes them.
_LOOPS = tuple(f"\0{name.removeprefix('scf.')}\0".encode() for name in LOOPS)

# Mean number of operations per kernel from which threads are used: 5 to 10 µs of one core. IREE 3.13.0's local-task
# takes 2 to 5 µs to hand a kernel to its threads, and more on a busy machine (docs/dev/measurements, "Threads").
_WORTH_THREADS = 600_000

# IREE's plugins for devices, by the backend that needs them. Every pass on every kernel collects the rewrite rules of
# all loaded operators. The operators of these plugins' dialects take a tenth of the compile time.
_DEVICE_PLUGINS = {
    "cuda": "hal_target_cuda",
    "metal": "hal_target_metal_spirv",
    "rocm": "hal_target_rocm",
    "vulkan": "hal_target_vulkan_spirv",
}

# A portable module consists of linalg and of torch-mlir's own scatters and sorts. To detect this itself, IREE loads the
# operators of every input dialect, which takes a tenth of its time before the phase `flow`.
_INPUT_TYPE = "--iree-input-type=tm_tensor"


@dataclass(frozen=True)
class CompiledModule:
    """A .vmfb in memory.

    Attributes:
        target: the target.
        flags: all flags of iree-compile.
        vmfb: the contents of the file.
        architecture: the CPU architecture; empty for a target that is not a CPU.
        features: the CPU features that the code was allowed to use.
        statistics: the compiler's statistics of the program.
        record: its kernels and launches.
    """

    target: Target
    flags: tuple[str, ...]
    vmfb: bytes
    architecture: str
    features: tuple[str, ...]
    statistics: Statistics
    record: TargetRecord

    @property
    def device(self) -> str:
        """The fastest IREE device for the module: without threads if kernels are short. Results are bit-identical."""
        work = self.statistics.work
        short = work.operations is not None and work.operations < _WORTH_THREADS * work.launches
        return (short and self.target.serial_device) or self.target.device


# Called with the peak bytes of intermediate values that each public function allocates; may raise.
Check = Callable[[Mapping[str, int]], None]


def unchecked(transients: Mapping[str, int]) -> None:
    """Accept any allocations."""


@dataclass(frozen=True)
class Compilation:
    """One target's compilation with one set of flags, from phase to phase.

    Attributes:
        source: the file of the portable module; the files of the phases are beside it.
        output: the .vmfb to write.
        context: what the module is compiled for.
        flags: the flags of iree-compile.
        threads: further flags of the phases that work on whole functions.
        observer: called after each pass.
    """

    source: Path
    output: Path
    context: ModuleContext
    flags: Sequence[str]
    threads: Sequence[str] = ()
    observer: ModuleObserver = unobserved

    @classmethod
    def of(
        cls,
        source: Path,
        target: Target,
        flags: Sequence[str],
        entry_points: Sequence[EntryPoint] = (),
        observer: ModuleObserver = unobserved,
    ) -> Compilation:
        """Create the compilation of the module in `source` for `target`.

        Args:
            source: the file of the portable module.
            target: the target to compile for.
            flags: flags of iree-compile: `COMMON_FLAGS` and the target's flags, unless a remedy has changed them.
            entry_points: the module's exported functions.
            observer: called after each pass.
        """
        context = ModuleContext(target, DATA_TILING in flags, entry_points)
        output = source.with_name(f"step.{target.name}.vmfb")
        threads = threads_for(entry_points)
        return cls(source, output, context, (*flags, *without_plugins(target)), threads, observer)

    def file(self, phase: Phase) -> Path:
        """The file of the module after `phase`."""
        return self.source.with_suffix(f".{phase.name}.mlirbc")

    def run(self, phase: Phase) -> None:
        """Run the passes of `phase` on its file."""
        run_phase_on_file(phase, self.file(phase), self.context, self.observer)

    def to_global_optimization(self) -> bytes:
        """Compile up to the phase `global-optimization`, before our passes in it; return the module as bytecode."""
        start, optimized = map(self.file, (INPUT, GLOBAL_OPTIMIZATION))
        flags = (*self.flags, *self.threads, "--emit-mlir-bytecode")
        start.write_bytes(self.source.read_bytes())
        self.run(INPUT)
        compile_file((*flags, _INPUT_TYPE, f"--compile-to={GLOBAL_OPTIMIZATION.name}"), start, optimized)
        return optimized.read_bytes()

    def to_flow(self) -> bytes:
        """Compile up to the phase `flow`, which forms kernels; return the module as bytecode."""
        optimized, flow = map(self.file, (GLOBAL_OPTIMIZATION, FLOW))
        flags = (*self.flags, *self.threads, "--emit-mlir-bytecode")
        self.to_global_optimization()
        self.run(GLOBAL_OPTIMIZATION)
        between = GLOBAL_OPTIMIZATION.name
        compile_file((*flags, f"--compile-from={between}", f"--compile-to={FLOW.name}"), optimized, flow)
        self.run(FLOW)
        return flow.read_bytes()

    def to_stream(self) -> bytes:
        """Compile up to the phase `stream`, which allocates memory; write the statistics beside the output."""
        flow, resources, scheduled, stream = map(self.file, (FLOW, RESOURCES, SCHEDULED, STREAM))
        flags = (*self.flags, *self.threads)
        if _has_loops(flow.read_bytes()):
            transform_file(_RESOURCES, flags, flow, resources)
            self.run(RESOURCES)
            transform_file(_SCHEDULE, flags, resources, scheduled)
        else:
            transform_file(f"{_RESOURCES},{_SCHEDULE}", flags, flow, scheduled)
        self.run(SCHEDULED)
        statistics = transform_file(_LOWER, flags, scheduled, stream, GATHERED)
        self.output.with_name(STATISTICS).write_text(statistics)
        return stream.read_bytes()

    def kernels(self, linking: Sequence[str], *, branches: bool) -> None:
        """Compile the kernels and write the output.

        Args:
            linking: the flags of `linking_flags`.
            branches: whether branches pass values on, so that the passes of the phase `vm` must make them safe.
        """
        flags, stream, vm = (*self.flags, *linking), self.file(STREAM), self.file(VM)
        if branches:
            compile_file((*flags, "--compile-from=stream", "--compile-to=vm", "--emit-mlir-bytecode"), stream, vm)
            self.run(VM)
            compile_file((*flags, "--compile-from=vm"), vm, self.output)
        else:
            compile_file((*flags, "--compile-from=stream"), stream, self.output)


def compile_module(
    module: PortableModule,
    target: Target,
    scratch: Path,
    check: Check = unchecked,
    observer: ModuleObserver = unobserved,
) -> CompiledModule:
    """Compile `module` for `target`.

    Args:
        module: the portable module.
        target: the target to compile for.
        scratch: the directory for the files of the phases.
        check: called with the functions' allocations before any kernel is compiled.
        observer: called after each pass.

    Raises:
        UnsupportedOpError: the module needs 64-bit integers that the target lacks.
        ToolchainError: IREE failed. The message has its diagnostic, the user's line if known, and the module's file.
    """
    source = scratch / "step.mlirbc"
    source.write_bytes(module.bytecode)
    flags = (*COMMON_FLAGS, *target.flags)
    while True:
        compilation = Compilation.of(source, target, flags, module.entry_points, observer)
        context = compilation.context
        try:
            flow = compilation.to_flow()
            with ThreadPoolExecutor(1, "count") as beside:
                reading = beside.submit(_kernels_of, flow)
                stream = compilation.to_stream()
            with parsed(stream) as whole:
                transients, (architecture, features) = transients_of(whole), cpu_of(whole)
                check(transients)
                if run_phase(STREAM, whole, context, target.disabled_passes, observer):
                    compilation.file(STREAM).write_bytes(bytecode_of(whole))
                linking = linking_flags(whole)
            kernels = reading.result()
            if kernels.packs_booleans and context.data_tiling:
                raise RefusedError("booleans are packed", DATA_TILING, ())
            compilation.kernels(linking, branches=kernels.branches)
            break
        except RefusedError as error:
            flags = error.remedied(flags)
    output = compilation.output
    statistics = read_statistics(output.with_name(STATISTICS), transients, kernels.traffic, kernels.work)
    vmfb = output.read_bytes()
    return CompiledModule(target, flags, vmfb, architecture, features, statistics, kernels.record)


def _has_loops(module: bytes) -> bool:
    return any(name in module for name in _LOOPS)


@dataclass(frozen=True)
class _Kernels:
    """Properties of a module's kernels after the phase `flow`.

    Attributes:
        traffic: the bytes that kernels read and write, as in `Statistics`.
        work: the operations of the kernels, as in `Statistics`.
        branches: the result of `has_branches`.
        packs_booleans: the result of `packs_booleans`.
        record: the kernels and launches.
    """

    traffic: dict[str, int]
    work: Work
    branches: bool
    packs_booleans: bool
    record: TargetRecord


def _kernels_of(flow: bytes) -> _Kernels:
    with parsed(flow) as module:
        moved, work = traffic_of(module), work_of(module)
        return _Kernels(moved, work, has_branches(module), packs_booleans(module), target_record(module))


def packs_booleans(flow: ir.Module) -> bool:
    """Whether a kernel with a product reads booleans that are packed like the product's operands.

    IREE 3.13.0 reads wrong booleans ("error 1e+09" for `(x @ w).masked_fill(mask, -1e9)`, with IREE's microkernel), or
    compiles the kernel for more than ten minutes.
    tests/pipeline/iree/test_toolchain.py tells when it no longer does.
    """
    return any("xi1" in str(op.results[0].type) for op in found_in(flow, PACKING))


def has_branches(flow: ir.Module) -> bool:
    """Whether a function of the module has structured control flow that returns values."""
    return any(op.name.startswith("scf.") and len(op.results) for f in functions_of(flow) for op in inside(f))


def threads_for(entry_points: Sequence[EntryPoint]) -> tuple[str, ...]:
    """Flags of the phases that work on whole functions: no threads if only one function computes."""
    computing = [entry for entry in entry_points if entry.name not in OF_STATE]
    return (WITHOUT_THREADS,) if len(computing) == 1 else ()


def without_plugins(target: Target) -> tuple[str, ...]:
    """Flags that leave out IREE's plugins for other devices than the target's."""
    return tuple(f"--iree-plugin=-{p}" for backend, p in _DEVICE_PLUGINS.items() if backend != target.backend)
