"""The whole compiler on one page: every stage in order, each a function from one frozen record to the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch.fx._lazy_graph_module import _use_lazy_graph_module

from irongrad.analysis.records import Analysis
from irongrad.graph.step_graph import StepGraph, with_frozen_state
from irongrad.operators.decompositions.recurrent import loops_for
from irongrad.operators.legalize.legality import check_float64
from irongrad.passes import Pass, run_passes
from irongrad.pipeline.assemble.assemble import AssembledModule, Part
from irongrad.pipeline.assemble.interface import (
    Interface,
    exchanging,
    inference_of,
    interfaces_of,
    selected,
    without_unused_state,
)
from irongrad.pipeline.assemble.packed_state import pack_together
from irongrad.pipeline.assemble.statistics import check_statistics
from irongrad.pipeline.backend import portable_module
from irongrad.pipeline.base_file import with_base
from irongrad.pipeline.build_cache import BuildRecord, cache_entry
from irongrad.pipeline.build_run import Build, BuildRun, StoppedEarly
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.capture.first_call import called_once
from irongrad.pipeline.choices import Choices, completed, declared
from irongrad.pipeline.front import front, plainly
from irongrad.pipeline.gc_pause import few_collections
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.iree.compile_cached import compile_all, compile_each
from irongrad.pipeline.joined_steps import joined, renamed_values
from irongrad.pipeline.lower.importer import ImportedStep, import_functions
from irongrad.pipeline.memory_budget import (
    OverBudgetError,
    asked_budget,
    begun,
    budget_of,
    check_limits,
    tightened,
)
from irongrad.pipeline.memory_report import limits_of_all, memory_of_all, usages_of_all
from irongrad.pipeline.optimizer.sharded_update import sharded
from irongrad.pipeline.options import Options, check_options, make_options
from irongrad.pipeline.oracle.alternating_steps import Alternation
from irongrad.pipeline.oracle.background_runs import AllExpected, Runs, first_runs
from irongrad.pipeline.package import Artifact, Modules, Origin, package, write_state
from irongrad.pipeline.place.placed_modules import PlacedModules, without_loops
from irongrad.pipeline.place.placed_step import placed
from irongrad.pipeline.step_record import step_record
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.pipeline.tuned_products import choices_of_products, with_forms
from irongrad.pipeline.tuned_step import is_tuned, keep_faster, step_times
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.devices import is_local
from irongrad.runtime.manifest import UNTUNED
from irongrad.runtime.memory import clear_early, keep_freed_memory
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.staging import staged
from irongrad.step.layouts import layouts_of
from irongrad.step.steps import Steps, named_steps
from irongrad.step.train_step import TrainStep
from irongrad.targets import Ability, Target, common_abilities

GOLDEN_STEPS = 3

Graphs = Mapping[str, StepGraph]


def compile(
    step: TrainStep | Steps,
    output: str | os.PathLike[str],
    target: str | Sequence[str] = "llvm-cpu",
    *,
    precision: str | None = None,
    bucket_fallback: str | None = None,
    **choices: Unpack[Choices],
) -> Artifact:
    """Compile a training step into an artifact directory, and verify it.

    Args:
        step: the training step, or several over one state.
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
            tune: choose the forms of products, convolutions and attention by measurement on this machine, not by
                cost models (`docs/tuning.md`).
            tune_seconds: how long `tune` may measure, in seconds; 60 by default. What is left keeps its default form.
            communicate: whether ranks exchange gradients inside the step (`docs/scaling.md`); False by default.
            bucket_size: the most that ranks exchange at once, with `communicate`; `25MiB` by default.
            place: targets for parts of the model, by the paths of its modules: `{"encoder": "llvm-cpu", "head":
                "vulkan"}` (`docs/placement.md`). `target` then does not count.
            shard: `optimizer` to divide the optimizer's state among the ranks, with `communicate`; nothing by default.
            sync_batch_norm: whether BatchNorm takes the statistics of all ranks' batches, with `communicate`; False by
                default. nn.SyncBatchNorm always does, with `communicate`.
            route: how PyTorch's operators become linalg: `linalg` (directly, the default) or `stablehlo`.
            entry_points: the entry points to include, all by default.
            base: a file for the frozen parameters and buffers, which artifacts of the same base share and processes map
                into one memory. `NAME.irpa` is written if it does not exist. It may also be the `.safetensors` or
                `.gguf` file from which the model was loaded.
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
        step = _with(step, precision=precision)
    if bucket_fallback is not None:
        step = _with(step, bucket_fallback=bucket_fallback)
    artifact = build(step, make_options(output, target, **completed(choices))).artifact
    assert artifact is not None
    return artifact


def _with(step: TrainStep | Steps, **changed: Any) -> TrainStep | Steps:
    """The step, or each of several, with other fields."""
    if isinstance(step, Steps):
        return Steps({name: replace(one, **changed) for name, one in step.steps.items()})
    return replace(step, **changed)


def build(step: TrainStep | Steps, options: Options) -> Build:
    """Run every stage: `capture`, those of the front up to the step graph, and then those of `_compiled`."""
    steps = named_steps(step)
    check_options(steps, options)
    run = BuildRun(options, last=[*steps][-1], watch=_stopwatch(options))
    with (
        run.errors(step),
        scratch_directory() as directory,
        few_collections(),
        # Graphs are interpreted or imported. Generating their Python code would take a tenth of the time for nothing.
        _use_lazy_graph_module(True),
        loops_for(has_kernels=_compiles_loops(options)),
        suppress(StoppedEarly),
        ExitStack() as stack,
    ):
        for one in steps.values():
            stack.enter_context(called_once(one))
        captured = run.stage("capture", _captured, steps, options)
        entry = cache_entry(captured, options, GOLDEN_STEPS)
        if entry is not None and (found := entry.load(options.output)) is not None:
            return run.from_cache(*found, entry.key)
        keep_freed_memory()  # each run of the oracle and of the compiled step reuses the memory of the run before
        fronts = {name: _front(run, name, captured) for name in captured}
        own = without_unused_state(fronts, options.entry_points)
        together = joined(step, captured, own)
        wholes = _whole(together.graphs, options)
        interfaces = interfaces_of(wholes, options.entry_points)
        graphs = {name: selected(wholes[name], interface) for name, interface in interfaces.items()}
        captured, run.last = {name: captured[name] for name in interfaces}, [*interfaces][-1]
        own = {name: selected(own[name], interface) for name, interface in interfaces.items()}
        alternation = Alternation(captured, own, together.names) if len(interfaces) > 1 else None
        first = partial(first_runs, {n: (made, own[n]) for n, made in captured.items()}, GOLDEN_STEPS, alternation)
        compiling = _compiled_parts if options.parts else _compiled
        compiled = compiling(run, first, graphs, interfaces, directory)
        run.part = ""
        run.statistics |= {c.target.name: c.statistics for c in compiled.targets}
        choices = (*(choice for record in run.records for choice in record.choices), *run.choices)
        layouts = layouts_of(step.model) if isinstance(step, TrainStep) else {}
        origin = Origin(options.asked, compiled.passes, choices, options.route, run.memory, layouts=layouts)
        origin = replace(origin, base=options.base, record=compiled.record)
        expected = renamed_values(compiled.expected, together)
        verified = compiled.module, compiled.targets, origin, expected, compiled.initial, options.output
        artifact: Artifact = run.stage("package", package, *verified)
        if run.watch is not None:
            artifact = _faster(run, artifact, step)
        run.artifact = artifact
        record = BuildRecord(tuple(run.records), run.statistics, artifact.reports)
        if entry is not None and entry.keep(artifact, record):
            run.key = entry.key
    return run.result()


def _whole(graphs: Mapping[str, StepGraph], options: Options) -> Mapping[str, StepGraph]:
    """The graphs with what the options add to them: a base, the exchange between ranks, and shards of the state.

    Raises:
        UserError: statistics over a batch cannot be exchanged.
    """
    wholes = exchanging(with_base(with_frozen_state(graphs), options.base), options.bucket_bytes)
    for graph in wholes.values():
        check_statistics(graph, options.route, budget=asked_budget(options.passes) is not None)
    return sharded(wholes) if options.shard else wholes


def _compiles_loops(options: Options) -> bool:
    """Whether all targets have kernels for loops; over StableHLO, there are no loops with initial values of zero."""
    return options.route == "linalg" and Ability.LOOPS in common_abilities(options.targets)


def _faster(run: BuildRun, tuned: Artifact, step: TrainStep | Steps) -> Artifact:
    """The tuned artifact, or the one without tuning if that is as fast; measured if the two differ."""
    options, watch = run.options, run.watch
    assert watch is not None
    if not is_tuned(tuned):
        return keep_faster(tuned, None, None, watch.budget)
    with staged(options.output) as aside:
        default = declared()["tune_seconds"].default
        plainly = replace(options, output=aside / UNTUNED, tune=False, tune_seconds=default)
        untuned = build(step, plainly)
        assert untuned.artifact is not None
        times = step_times(tuned, untuned.artifact, options.cache, watch.budget)
        artifact = keep_faster(tuned, untuned.artifact, times, watch.budget)
    if artifact.manifest.tuning is not None and artifact.manifest.tuning.kept == UNTUNED:
        run.records[:], run.statistics, run.memory = untuned.passes, untuned.statistics, untuned.memory
    return artifact


def _stopwatch(options: Options) -> Stopwatch | None:
    budget = TuningBudget(options.tune_seconds, options.on_measuring)
    return Stopwatch(options.targets, options.cache, budget) if options.tune else None


def _captured(steps: Mapping[str, TrainStep], options: Options) -> dict[str, CapturedStep]:
    return {
        name: capture(step, inference_of(options.entry_points, step.entries), options.synchronised)
        for name, step in steps.items()
    }


def _front(run: BuildRun, name: str, captured: Mapping[str, CapturedStep]) -> StepGraph:
    run.part = name
    return front(captured[name], run.stage, [made for other, made in captured.items() if other != name])


@dataclass(frozen=True)
class _Compiled:
    """Steps compiled for every target, within their memory budget.

    Attributes:
        passes: the passes that ran on the steps.
        module: the portable module, or those of the parts.
        targets: the compiled module of each target.
        expected: the expected values of each step.
        initial: the file of the initial state.
        record: what the steps do, without their targets.
    """

    passes: tuple[Pass, ...]
    module: Modules
    targets: Sequence[CompiledModule]
    expected: AllExpected
    initial: Path
    record: Analysis


def _compiled(
    run: BuildRun,
    first: Callable[[], AbstractContextManager[Runs]],
    wholes: Graphs,
    interfaces: Mapping[str, Interface],
    scratch: Path,
) -> _Compiled:
    """Run the stages from `passes` to `compile`, again if IREE allocates more than the budget."""
    options, stage = run.options, run.stage
    passes, reached = begun(options.passes, wholes.values()), list[int]()
    assembled = partial(portable_module, disabled=options.disabled_module_passes, observer=run.note_module_pass())
    compiled = partial(compile_all, options.module_cache, observer_of=run.note_module_pass)
    graphs = _all_optimised(run, wholes, passes)
    targets = _with_measured_products(run, graphs, interfaces, scratch) if run.watch else options.targets
    with first() as runs:
        while True:
            budget = budget_of(passes, run.records)
            planned = partial(memory_of_all, graphs, interfaces, budget=budget)
            try:
                parts = [Part(_imported(run, name, graph, scratch), interfaces[name]) for name, graph in graphs.items()]
                run.part = ""
                module: AssembledModule = stage("assemble", assembled, parts)
            except StoppedEarly:  # so iree-compile does not run, and the plan cannot run beside it
                run.memory = planned(usages_of_all(graphs, options.backends))
                raise
            check = partial(check_limits, limits_of_all(graphs, interfaces, budget))
            # iree-compile is a separate process that does not keep every core busy.
            with ThreadPoolExecutor(1, "compile") as beside:
                compiling = beside.submit(compiled, module, targets, scratch, check)
                compiling.add_done_callback(lambda _: runs.alone())
                usages = usages_of_all(graphs, options.backends)
                run.memory = planned(usages)
                if not reached:
                    initial = write_state(module, scratch)
                    expected: AllExpected = stage("oracle", runs.result)
                    if not compiling.done() and any(is_local(target.device) for target in options.targets):
                        # As much as the verification needs, on the core that iree-compile leaves idle.
                        clear_early(initial.stat().st_size + max(run.memory.predicted.values(), default=0))
                try:
                    record = step_record(wholes, graphs, interfaces, run.records, usages)
                    return _Compiled(passes, module, stage("compile", compiling.result), expected, initial, record)
                except OverBudgetError as over:
                    reached.append(over.allocated)
            passes = tightened(passes, budget, reached)
            graphs = _all_optimised(run, wholes, passes)


def _with_measured_products(
    run: BuildRun, graphs: Graphs, interfaces: Mapping[str, Interface], scratch: Path
) -> tuple[Target, ...]:
    """The targets with the forms of products that are fastest on this machine, before any other work runs on it."""
    options = run.options
    assert run.watch is not None
    parts = [Part(import_functions(g, scratch, options.route), interfaces[name]) for name, g in graphs.items()]
    module = portable_module(parts, options.disabled_module_passes)
    run.choices = choices_of_products(module, run.watch)
    return tuple(with_forms(target, run.choices) for target in options.targets)


def _compiled_parts(
    run: BuildRun,
    first: Callable[[], AbstractContextManager[Runs]],
    wholes: Graphs,
    interfaces: Mapping[str, Interface],
    scratch: Path,
) -> _Compiled:
    """Cut the step into parts, and run the stages from `passes` to `compile` on each."""
    options, stage = run.options, run.stage
    ((name, whole),) = wholes.items()
    cut = placed(whole, without_loops(interfaces[name]), options.parts)
    run.records.clear()
    with first() as runs:
        modules: dict[str, AssembledModule] = {}
        optimised: dict[str, StepGraph] = {}
        for number, part in enumerate(cut.parts):
            run.part, run.last = part.part.name, cut.parts[-1].part.name
            target = options.targets[number]
            graph = optimised[run.part] = stage("passes", _optimised, part.graph, options.passes, run, (target,))
            imported = _imported(run, run.part, graph, scratch)
            assembled = partial(portable_module, disabled=options.disabled_module_passes)
            modules[target.name] = stage("assemble", assembled, [Part(imported, part.interface)])
        run.part = ""
        graphs = {part.part.name: part.graph for part in cut.parts}
        own = {part.part.name: part.interface for part in cut.parts}
        usages = usages_of_all(optimised, options.backends)
        run.memory = memory_of_all(optimised, own, usages)
        pairs = [*zip(modules.values(), options.targets, strict=True)]
        runs.alone()
        expected: AllExpected = stage("oracle", runs.result)
        compiled = partial(compile_each, options.module_cache, observer_of=run.note_module_pass)
        targets = stage("compile", compiled, pairs, scratch)
        record = step_record(graphs, optimised, own, run.records, usages)
    program = PlacedModules(whole, without_loops(interfaces[name]), cut.placement, modules)
    return _Compiled(options.passes, program, targets, expected, write_state(program, scratch), record)


def _imported(run: BuildRun, name: str, graph: StepGraph, scratch: Path) -> ImportedStep:
    run.part = name
    return run.stage("import", import_functions, graph, scratch, run.options.route)


def _all_optimised(run: BuildRun, graphs: Graphs, passes: tuple[Pass, ...]) -> dict[str, StepGraph]:
    """Run `passes` on each step, and pack state that is updated together."""
    run.records.clear()
    optimised: dict[str, StepGraph] = {}
    for name, graph in graphs.items():
        run.part = name
        optimised[name] = run.stage("passes", _optimised, graph, passes, run, run.options.targets)
    return pack_together(optimised)


def _optimised(graph: StepGraph, passes: tuple[Pass, ...], run: BuildRun, targets: tuple[Target, ...]) -> StepGraph:
    """Run `passes`; float64 is checked after them, because they remove some of it."""
    abilities = common_abilities(targets)
    backends = [target.backend for target in targets]
    optimised = run_passes(graph, passes, backends, run.note_pass, run.watch, abilities=abilities)
    check_float64(optimised, targets)
    return optimised


def step_graph(step: TrainStep) -> StepGraph:
    """The step graph before any pass."""
    with called_once(step):
        return front(capture(step), plainly)
