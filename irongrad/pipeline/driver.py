"""The whole compiler on one page: every stage in order, each a function from one frozen record to the next."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from torch.fx._lazy_graph_module import _use_lazy_graph_module

from irongrad.diagnostics.refusals import refused_together
from irongrad.graph.step_graph import Range, StepGraph
from irongrad.operators.legalize.legality import check_float64, check_operators
from irongrad.passes import Pass, run_passes
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.pipeline.assemble.interface import Interface, describe, inference_of, selected
from irongrad.pipeline.assemble.packed_state import pack_state
from irongrad.pipeline.backend import portable_module
from irongrad.pipeline.build_cache import BuildRecord, cache_entry
from irongrad.pipeline.build_run import Build, BuildRun, StoppedEarly
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.choices import Choices, completed
from irongrad.pipeline.differentiate.differentiate import JointStep, differentiate
from irongrad.pipeline.gc_pause import few_collections
from irongrad.pipeline.guards.index_ranges import step_ranges
from irongrad.pipeline.guards.range_checks import add_guards
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.iree.compile_cached import compile_all
from irongrad.pipeline.lower.importer import ImportedStep, import_functions
from irongrad.pipeline.memory_budget import OverBudgetError, budget_of, check_limits, tightened
from irongrad.pipeline.memory_report import limits_of, memory_of
from irongrad.pipeline.optimizer.split_step import cut
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.pipeline.options import Options, check_choices, make_options
from irongrad.pipeline.oracle.background_runs import first_runs
from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes
from irongrad.pipeline.package import Artifact, Origin, package, write_state
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.runtime.devices import is_local
from irongrad.runtime.memory import clear_early, keep_freed_memory
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
        output: the directory to write; an artifact that is there already is replaced once the new one is verified.
        target: one target or several, such as `llvm-cpu`, `llvm-cpu:cpu=x86-64-v3` or `vulkan:profile=desktop`;
            `irongrad targets` lists them.
        precision: in place of the step's own, `f32`, `bf16` or `f16`.
        bucket_fallback: in place of the step's own, `dynamic` for a function of any size beside the buckets.
        choices: any of these, by name:
            opt_level: 0 to 3, how much to optimise; 2 by default.
            passes: exactly these passes in place of the level's, such as `dce,cse`; `irongrad passes` lists them.
            disable_passes: names of passes to leave out.
            max_memory: the most that the intermediate values of a step may take, such as `512MiB`, or `50%` of what
                they take without a limit. The backward then computes again what it cannot keep.
            tune: choose the forms of convolutions by measurement on this machine, and not by a table of costs.
            route: from PyTorch's operators to linalg: `linalg` directly, as by default, or over `stablehlo`.
            entry_points: which entry points to include, all by default.
            dump_dir: where to write every stage's readable form.
            cache: whether to take from the cache on disk what was compiled before, and to keep what is compiled; it is
                by default.

    Raises:
        CaptureError: the step cannot be captured; with the user's line.
        UnsupportedOpError: it uses an operator that cannot be compiled.
        UserError: the step cannot be made to fit into `max_memory`, with the smallest budget that can; or `tune` is
            asked for, and a target cannot run here.
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
    """Run every stage."""
    check_choices(step, options.passes, options.route)
    run = BuildRun(options)
    stage = run.stage
    with (
        tempfile.TemporaryDirectory(prefix="irongrad-") as directory,
        few_collections(),
        # Graphs are interpreted and imported; the Python code of a module, a tenth of the time here, is never run.
        _use_lazy_graph_module(True),
        suppress(StoppedEarly),
    ):
        captured: CapturedStep = stage("capture", capture, step, inference_of(options.entry_points))
        entry = cache_entry(captured, options, GOLDEN_STEPS)
        if entry is not None and (found := entry.load(options.output)) is not None:
            return run.from_cache(*found, entry.key)
        keep_freed_memory()  # every run of the oracle, and of what is verified, allocates what the one before has freed
        with refused_together():
            joint: JointStep = stage("differentiate", differentiate, captured)
            graph: StepGraph = stage("optimizer", add_optimizer, joint)
            graph = cut(graph, step.between)
            ranges: list[Range] = step_ranges(captured)
            graph = stage("guards", add_guards, graph, ranges)
            check_operators(graph)
        interface: Interface = describe(graph, ranges, options.entry_points)
        made = _compiled(run, captured, selected(graph, interface), interface, Path(directory))
        run.statistics |= {c.target.name: c.statistics for c in made.targets}
        choices = tuple(choice for record in run.records for choice in record.choices)
        origin = Origin(options.asked, made.passes, choices, options.route, run.memory)
        expected = made.expected.own, made.initial, options.output, made.expected.others
        artifact = stage("package", package, made.module, made.targets, origin, *expected)
        run.artifact = artifact
        record = BuildRecord(tuple(run.records), run.statistics, artifact.reports)
        if entry is not None and entry.keep(artifact, record):
            run.key = entry.key
    return run.result()


@dataclass(frozen=True)
class _Compiled:
    """A step compiled for every target, within its budget of memory.

    Attributes:
        passes: what ran on it.
        module: what it was compiled from.
        targets: for each target, what it became.
        expected: the numbers that it has to give.
        initial: the file of its initial state.
    """

    passes: tuple[Pass, ...]
    module: AssembledModule
    targets: Sequence[CompiledModule]
    expected: ExpectedAtSizes
    initial: Path


def _compiled(
    run: BuildRun, captured: CapturedStep, whole: StepGraph, interface: Interface, scratch: Path
) -> _Compiled:
    """Run the stages from `passes` to `compile`; again where IREE allocates more than the budget."""
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
            except StoppedEarly:  # so there is no iree-compile to plan the memory beside
                run.memory = memory_of(graph, interface, options.backends, budget)
                raise
            check = partial(check_limits, limits_of(graph, interface, budget))
            # iree-compile is a process, and does not keep every core busy.
            with ThreadPoolExecutor(1) as beside:
                compiling = beside.submit(compiled, module, options.targets, scratch, check)
                run.memory = memory_of(graph, interface, options.backends, budget)
                if not reached:
                    expected: ExpectedAtSizes = stage("oracle", runs)
                    initial = write_state(module, scratch)
                    if any(is_local(target.device) for target in options.targets):
                        # As much as it takes to verify the step, on the core that iree-compile leaves idle here.
                        clear_early(initial.stat().st_size + max(run.memory.predicted.values(), default=0))
                try:
                    return _Compiled(passes, module, stage("compile", compiling.result), expected, initial)
                except OverBudgetError as over:
                    reached.append(over.allocated)
            passes = tightened(passes, budget, reached)
            graph = stage("passes", _optimised, whole, passes, run)


def _optimised(graph: StepGraph, passes: tuple[Pass, ...], run: BuildRun) -> StepGraph:
    """Run `passes`, and store together what they update together.

    What they leave is all that devices without float64 have to do.
    """
    options = run.options
    run.records.clear()
    timer = Stopwatch(options.targets, options.cache, options.on_measuring) if options.tune else None
    optimised = run_passes(graph, passes, options.backends, run.note_pass, timer)
    check_float64(optimised, options.targets)
    return pack_state(optimised)


def step_graph(step: TrainStep) -> StepGraph:
    """The step graph before any pass."""
    captured = capture(step)
    return add_guards(cut(add_optimizer(differentiate(captured)), step.between), step_ranges(captured))
