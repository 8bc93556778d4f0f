"""The whole compiler on one page: every stage in order, each a function from one frozen record to the next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from torch.fx._lazy_graph_module import _use_lazy_graph_module

from irongrad.graph.step_graph import StepGraph
from irongrad.operators.legalize.legality import check_float64
from irongrad.passes import Pass, run_passes
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.pipeline.assemble.interface import Interface, describe, inference_of, selected
from irongrad.pipeline.assemble.packed_state import pack_state
from irongrad.pipeline.backend import portable_module
from irongrad.pipeline.build_cache import BuildRecord, cache_entry
from irongrad.pipeline.build_run import Build, BuildRun, StoppedEarly
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.capture.first_call import called_once
from irongrad.pipeline.choices import Choices, completed
from irongrad.pipeline.front import front, plainly
from irongrad.pipeline.gc_pause import few_collections
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.iree.compile_cached import compile_all
from irongrad.pipeline.lower.importer import ImportedStep, import_functions
from irongrad.pipeline.memory_budget import OverBudgetError, budget_of, check_limits, tightened
from irongrad.pipeline.memory_report import limits_of, memory_of
from irongrad.pipeline.options import Options, check_choices, make_options
from irongrad.pipeline.oracle.background_runs import first_runs
from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes
from irongrad.pipeline.package import Artifact, Origin, package, write_state
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.runtime.devices import is_local
from irongrad.runtime.memory import clear_early, keep_freed_memory
from irongrad.runtime.scratch import scratch_directory
from irongrad.step.train_step import TrainStep

GOLDEN_STEPS = 3


def compile(
    step: TrainStep,
    output: str | os.PathLike[str],
    target: str | Sequence[str] = "llvm-cpu",
    *,
    precision: str | None = None,
    bucket_fallback: str | None = None,
    **choices: Unpack[Choices],
) -> Artifact:
    """Compile a training step into an artifact directory, and verify it.

    Args:
        step: the training step.
        output: the directory to write. An artifact in it is replaced once the new one is verified.
        target: one target or several, such as `llvm-cpu`, `llvm-cpu:cpu=x86-64-v3` or `vulkan:profile=desktop`;
            `irongrad targets` lists them.
        precision: `f32`, `bf16` or `f16`; None for the step's own.
        bucket_fallback: `dynamic` for a function of any size beside the buckets; None for the step's own.
        choices: any of these, by name:
            opt_level: 0 to 3, how much to optimise; 2 by default.
            passes: exactly these passes instead of the level's, such as `dce,cse`; `irongrad passes` lists them.
            disable_passes: names of passes to leave out.
            max_memory: the most memory of a step's intermediate values: a size such as `512MiB`, or a share such as
                `50%` of their memory without a budget. The backward then recomputes values that do not fit.
            tune: choose the forms of convolutions by measurement on this machine, not by a cost table.
            route: how PyTorch's operators become linalg: `linalg` (directly, the default) or `stablehlo`.
            entry_points: the entry points to include, all by default.
            dump_dir: the directory for every stage's readable form.
            cache: whether to use the cache on disk, to find earlier results and to keep new ones; True by default.

    Raises:
        CaptureError: the step cannot be captured; the message has the user's line.
        UnsupportedOpError: the step uses an operator that cannot be compiled.
        UserError: the step does not fit into `max_memory`; the message has the smallest budget that is possible. Or
            `tune` is given, and a target cannot run here.
        ToolchainError: torch-mlir or IREE failed.
        VerificationError: the compiled step disagrees with the float64 oracle; nothing is written.
    """
    if precision is not None:
        step = replace(step, precision=precision)
    if bucket_fallback is not None:
        step = replace(step, bucket_fallback=bucket_fallback)
    artifact = build(step, make_options(output, target, **completed(choices))).artifact
    assert artifact is not None
    return artifact


def build(step: TrainStep, options: Options) -> Build:
    """Run every stage: `capture`, those of the front up to the step graph, and then those of `_compiled`."""
    check_choices(step, options.passes, options.route)
    run = BuildRun(options)
    stage = run.stage
    with (
        run.errors(step),
        scratch_directory() as directory,
        few_collections(),
        # Graphs are interpreted or imported. Generating their Python code would take a tenth of the time for nothing.
        _use_lazy_graph_module(True),
        suppress(StoppedEarly),
        called_once(step),
    ):
        captured: CapturedStep = stage("capture", capture, step, inference_of(options.entry_points, step.entries))
        entry = cache_entry(captured, options, GOLDEN_STEPS)
        if entry is not None and (found := entry.load(options.output)) is not None:
            return run.from_cache(*found, entry.key)
        keep_freed_memory()  # each run of the oracle and of the compiled step reuses the memory of the run before
        graph = front(captured, stage)
        interface: Interface = describe(graph, options.entry_points)
        compiled = _compiled(run, captured, selected(graph, interface), interface, directory)
        run.statistics |= {c.target.name: c.statistics for c in compiled.targets}
        choices = tuple(choice for record in run.records for choice in record.choices)
        origin = Origin(options.asked, compiled.passes, choices, options.route, run.memory)
        verified = compiled.expected
        expected = verified.own, compiled.initial, options.output, verified.others, verified.skipped
        artifact = stage("package", package, compiled.module, compiled.targets, origin, *expected)
        run.artifact = artifact
        record = BuildRecord(tuple(run.records), run.statistics, artifact.reports)
        if entry is not None and entry.keep(artifact, record):
            run.key = entry.key
    return run.result()


@dataclass(frozen=True)
class _Compiled:
    """A step compiled for every target, within its memory budget.

    Attributes:
        passes: the passes that ran on the step.
        module: the portable module.
        targets: the compiled module of each target.
        expected: the expected values.
        initial: the file of the initial state.
    """

    passes: tuple[Pass, ...]
    module: AssembledModule
    targets: Sequence[CompiledModule]
    expected: ExpectedAtSizes
    initial: Path


def _compiled(
    run: BuildRun, captured: CapturedStep, whole: StepGraph, interface: Interface, scratch: Path
) -> _Compiled:
    """Run the stages from `passes` to `compile`, again if IREE allocates more than the budget."""
    options, stage = run.options, run.stage
    passes, reached = options.passes, list[int]()
    assembled = partial(portable_module, disabled=options.disabled_module_passes, observer=run.note_module_pass())
    compiled = partial(compile_all, options.module_cache, observer_of=run.note_module_pass)
    graph: StepGraph = stage("passes", _optimised, whole, passes, run)
    with first_runs(captured, graph, GOLDEN_STEPS) as runs:
        while True:
            budget = budget_of(passes, run.records)
            try:
                imported: ImportedStep = stage("import", import_functions, graph, scratch, options.route)
                module: AssembledModule = stage("assemble", assembled, imported, interface)
            except StoppedEarly:  # so iree-compile does not run, and the plan cannot run beside it
                run.memory = memory_of(graph, interface, options.backends, budget)
                raise
            check = partial(check_limits, limits_of(graph, interface, budget))
            # iree-compile is a separate process that does not keep every core busy.
            with ThreadPoolExecutor(1) as beside:
                compiling = beside.submit(compiled, module, options.targets, scratch, check)
                run.memory = memory_of(graph, interface, options.backends, budget)
                if not reached:
                    expected: ExpectedAtSizes = stage("oracle", runs)
                    initial = write_state(module, scratch)
                    if any(is_local(target.device) for target in options.targets):
                        # As much as the verification needs, on a core that iree-compile leaves idle.
                        clear_early(initial.stat().st_size + max(run.memory.predicted.values(), default=0))
                try:
                    return _Compiled(passes, module, stage("compile", compiling.result), expected, initial)
                except OverBudgetError as over:
                    reached.append(over.allocated)
            passes = tightened(passes, budget, reached)
            graph = stage("passes", _optimised, whole, passes, run)


def _optimised(graph: StepGraph, passes: tuple[Pass, ...], run: BuildRun) -> StepGraph:
    """Run `passes`, and pack state that is updated together.

    float64 is checked after the passes, because they remove some of it.
    """
    options = run.options
    run.records.clear()
    timer = Stopwatch(options.targets, options.cache, options.on_measuring) if options.tune else None
    optimised = run_passes(graph, passes, options.backends, run.note_pass, timer)
    check_float64(optimised, options.targets)
    return pack_state(optimised)


def step_graph(step: TrainStep) -> StepGraph:
    """The step graph before any pass."""
    with called_once(step):
        return front(capture(step), plainly)
