"""The whole compiler on one page: every stage in order, each a function from one frozen record to the next."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from torch.fx._lazy_graph_module import _use_lazy_graph_module

from irongrad.cache import Store, default_store
from irongrad.cache.builds import BuildRecord, compile_all, place_of
from irongrad.passes import DEFAULT_LEVEL, Pass, PassRecord, chosen_passes, run_passes
from irongrad.pipeline.assemble import AssembledModule, assemble
from irongrad.pipeline.bucket_examples import at_other_sizes
from irongrad.pipeline.budget import OverBudgetError, asked_budget, budget_of, check_limits, tightened
from irongrad.pipeline.capture import CapturedStep, capture
from irongrad.pipeline.compile import CompiledModule
from irongrad.pipeline.differentiate import JointStep, differentiate
from irongrad.pipeline.dump import dump_pass, dump_stage
from irongrad.pipeline.expected import Expected
from irongrad.pipeline.graphs import Function, StepGraph
from irongrad.pipeline.guards import add_guards
from irongrad.pipeline.importer import ImportedStep, import_functions
from irongrad.pipeline.interface import Interface, describe, inference_of, selected
from irongrad.pipeline.legality import check_float64, check_operators
from irongrad.pipeline.memory import memory_of
from irongrad.pipeline.optimizer import add_optimizer
from irongrad.pipeline.oracle import golden_runs
from irongrad.pipeline.package import Artifact, Origin, package
from irongrad.pipeline.packing import pack_state
from irongrad.pipeline.pieces import cut
from irongrad.pipeline.ranges import Range, step_ranges
from irongrad.pipeline.refusals import refused_together
from irongrad.pipeline.routes import known_route
from irongrad.pipeline.staging import check_output
from irongrad.pipeline.statistics import Statistics
from irongrad.pipeline.timing import Stopwatch
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import MemorySpec
from irongrad.step import TrainStep, sizes_of
from irongrad.targets import Target, parse_targets

STAGES = (
    "capture",
    "differentiate",
    "optimizer",
    "guards",
    "passes",
    "import",
    "assemble",
    "oracle",
    "compile",
    "package",
)
GOLDEN_STEPS = 3

# New objects, less those that are gone, from one look for garbage to the next; some 20 MB. Python has 700.
_ALLOCATIONS = 200_000

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How to compile.

    Attributes:
        output: the artifact's directory.
        targets: what to compile for.
        asked: what the user called each of them.
        passes: what to run on the step graph, in order.
        max_memory: the budget of the intermediate values, such as `512MiB` or `50%`; empty for no limit.
        tune: whether passes that have a choice make it by measurement on the targets.
        route: from PyTorch's operators to linalg: `linalg` directly, or over `stablehlo`.
        entry_points: which entry points to include; None for all. Fewer compile faster, and without `grad_step` no
            memory is set aside for accumulated gradients.
        dump_dir: where to write every stage's readable form; None for nowhere.
        stop_after: the last stage to run, a name in `STAGES`; None for all.
        cache: where to look for what was compiled before, and to keep what is compiled; None for nowhere.
        on_stage: called with a stage's name, returns a context manager that is open while it runs.
        on_measuring: called with what is about to be measured.
    """

    output: Path
    targets: tuple[Target, ...]
    asked: tuple[str, ...]
    passes: tuple[Pass, ...]
    max_memory: str = ""
    tune: bool = False
    route: str = "linalg"
    entry_points: tuple[str, ...] | None = None
    dump_dir: Path | None = None
    stop_after: str | None = None
    cache: Store | None = None
    on_stage: Callable[[str], AbstractContextManager[object]] = field(default=lambda name: nullcontext())
    on_measuring: Callable[[str], None] = field(default=lambda what: None)


@dataclass(frozen=True)
class Build:
    """What a run of the compiler made.

    Attributes:
        artifact: what was written; None when it was stopped early.
        seconds: how long each stage took; `compile` is what was left of it after `oracle`, beside which it runs.
        passes: what each pass did to each function.
        statistics: what the compiler says of the program, by target; empty when it was stopped before that.
        memory: the plan of its memory; None when it was stopped before that.
        cached: whether the artifact comes from the cache; `seconds` has `capture` and `cache` then.
        key: under which the cache has the artifact; None where it does not.
    """

    artifact: Artifact | None
    seconds: dict[str, float]
    passes: tuple[PassRecord, ...]
    statistics: dict[str, Statistics]
    memory: MemorySpec | None
    cached: bool = False
    key: str | None = None


def check_choices(step: TrainStep, passes: Sequence[Pass], route: str) -> None:
    """Refuse what cannot be asked for of this step.

    Raises:
        UserError: a budget of memory for a step in pieces, or what needs known sizes for functions of any size.
    """
    budget = asked_budget(passes) is not None
    if budget and step.between:
        raise UserError("max_memory needs forward and backward in one piece, and this step has two: leave it out")
    of_any_size = step.dynamic and (step.bucket_fallback or not step.bucket_list)
    names = ", ".join(sizes_of(step, step.inputs))
    remedy = "leave out bucket_fallback" if step.bucket_fallback else f"give buckets for {names}"
    if budget and of_any_size:
        raise UserError(f"max_memory needs known sizes, and functions of any size leave {names} open: {remedy}")
    if route == "stablehlo" and of_any_size:
        raise UserError(
            "the route over StableHLO needs known sizes, for torch-mlir refines every shape to numbers on the way, and "
            f"functions of any size leave {names} open: {remedy}, or take the route linalg"
        )


class StoppedEarly(Exception):  # noqa: N818 (it is no error)
    """Raised inside the driver when `stop_after` is reached."""


@dataclass
class _Run:
    """A run of the compiler, as far as it is; of what it is asked for as often as it is planned again, the last.

    Attributes:
        options: how to compile.
        seconds: how long each stage took, in all.
        records: what each pass did to each function.
        statistics: as in `Build`, as are the others.
        memory: as above.
        artifact: as above.
        key: as above.
    """

    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    memory: MemorySpec | None = None
    artifact: Artifact | None = None
    key: str | None = None

    def stage(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns, timed, shown and dumped as a stage.

        Raises:
            StoppedEarly: it was the last that was asked for.
        """
        start = time.perf_counter()
        with self.options.on_stage(name):
            result = function(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        if self.options.dump_dir is not None:
            dump_stage(self.options.dump_dir, STAGES.index(name) + 1, name, result)
        if self.options.stop_after == name:
            raise StoppedEarly
        return result

    def result(self) -> Build:
        """What came of it."""
        records = tuple(self.records)
        return Build(self.artifact, self.seconds, records, self.statistics, self.memory, key=self.key)


@dataclass(frozen=True)
class _Compiled:
    """A step compiled for every target, within its budget of memory.

    Attributes:
        passes: what ran on it.
        module: what it was compiled from.
        targets: for each target, what it became.
        expected: the numbers that it has to give, at its own sizes and at those of each other bucket.
    """

    passes: tuple[Pass, ...]
    module: AssembledModule
    targets: Sequence[CompiledModule]
    expected: Sequence[Expected]


def build(step: TrainStep, options: Options) -> Build:
    """Run every stage."""
    began = time.perf_counter()
    check_choices(step, options.passes, options.route)
    run = _Run(options)
    stage = run.stage
    # Graphs are interpreted and imported; the Python code of a module, a tenth of the time here, is never run.
    lazily = _use_lazy_graph_module(True)
    with tempfile.TemporaryDirectory(prefix="irongrad-") as directory, _few_collections(), lazily:
        try:
            captured: CapturedStep = stage("capture", capture, step, inference_of(options.entry_points))
            place = place_of(captured, options, GOLDEN_STEPS)
            if place is not None and (found := place.load(options.output)) is not None:
                return _from_cache(*found, run.seconds, began, place.key)
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
            first, *others = made.expected
            artifact = stage("package", package, made.module, made.targets, origin, first, options.output, others)
            run.artifact = artifact
            record = BuildRecord(tuple(run.records), run.statistics, artifact.reports)
            if place is not None and place.keep(artifact, record):
                run.key = place.key
        except StoppedEarly:
            pass
    return run.result()


def _compiled(run: _Run, captured: CapturedStep, whole: StepGraph, interface: Interface, scratch: Path) -> _Compiled:
    """Run the stages from `passes` to `compile`; again where IREE allocates more than the budget."""
    options, stage = run.options, run.stage
    passes, reached, expected = options.passes, list[int](), list[Expected]()
    while True:
        run.records.clear()
        graph: StepGraph = stage("passes", _optimised, whole, passes, options, run.records)
        budget = budget_of(passes, run.records)
        run.memory = memory_of(graph, interface, budget)
        imported: ImportedStep = stage("import", import_functions, graph, scratch, options.route)
        module: AssembledModule = stage("assemble", assemble, imported, interface)
        check = partial(check_limits, run.memory.limits)
        # iree-compile is a process, and does not keep every core busy.
        with ThreadPoolExecutor(1) as beside:
            compiling = beside.submit(compile_all, options.cache, module, options.targets, scratch, check)
            if not expected:
                expected = [stage("oracle", _first_run, captured, graph, GOLDEN_STEPS)]
                expected += [_first_run(c, graph, 1) for c in at_other_sizes(captured, graph)]
            try:
                return _Compiled(passes, module, stage("compile", compiling.result), expected)
            except OverBudgetError as over:
                reached.append(over.allocated)
                passes = tightened(passes, budget, reached)


def _first_run(captured: CapturedStep, graph: StepGraph, steps: int) -> Expected:
    return Expected(golden_runs(captured, graph, steps))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Keep the garbage collector from going through graphs in use, and all that torch is made of, again and again.

    That took a tenth of the time here, and the first step after it took another collection of everything.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _from_cache(artifact: Artifact, record: BuildRecord, seconds: dict[str, float], began: float, key: str) -> Build:
    seconds["cache"] = time.perf_counter() - began - sum(seconds.values())
    memory = artifact.manifest.memory
    return Build(artifact, seconds, record.passes, record.statistics, memory, cached=True, key=key)


def step_graph(step: TrainStep) -> StepGraph:
    """The step graph before any pass."""
    captured = capture(step)
    return add_guards(cut(add_optimizer(differentiate(captured)), step.between), step_ranges(captured))


def _optimised(graph: StepGraph, passes: tuple[Pass, ...], options: Options, records: list[PassRecord]) -> StepGraph:
    """Run `passes`, adding what each did to `records`, and store together what they update together.

    What they leave is all that devices without float64 have to do.
    """

    def keep(number: int, record: PassRecord, function: Function) -> None:
        records.append(record)
        if options.dump_dir is not None and record.changed:
            dump_pass(options.dump_dir / f"{STAGES.index('passes') + 1:02d}_passes", number + 1, record, function)

    timer = Stopwatch(options.targets, options.cache, options.on_measuring) if options.tune else None
    optimised = run_passes(graph, passes, [t.backend for t in options.targets], keep, timer)
    check_float64(optimised, options.targets)
    return pack_state(optimised)


class Choices(TypedDict, total=False):
    """What `compile` takes by name and hands on to `make_options`, which has the defaults."""

    opt_level: int
    passes: str | None
    disable_passes: Sequence[str]
    max_memory: str
    tune: bool
    route: str
    entry_points: Sequence[str] | None
    dump_dir: str | os.PathLike[str] | None
    cache: bool


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
    if unknown := choices.keys() - Choices.__annotations__.keys():
        raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
    if precision is not None:
        step = replace(step, precision=precision)
    if bucket_fallback is not None:
        step = replace(step, bucket_fallback=bucket_fallback)
    artifact = build(step, make_options(output, target, **choices)).artifact
    assert artifact is not None
    return artifact


def make_options(
    output: str | os.PathLike[str],
    target: str | Sequence[str] = "llvm-cpu",
    *,
    opt_level: int = DEFAULT_LEVEL,
    passes: str | None = None,
    disable_passes: Sequence[str] = (),
    max_memory: str = "",
    tune: bool = False,
    route: str = "linalg",
    entry_points: Sequence[str] | None = None,
    dump_dir: str | os.PathLike[str] | None = None,
    stop_after: str | None = None,
    cache: bool = True,
    on_stage: Callable[[str], AbstractContextManager[object]] | None = None,
    on_measuring: Callable[[str], None] = lambda what: None,
) -> Options:
    """Check and convert what a caller gives.

    Raises:
        UserError: an unknown target, pass, route or stage, a budget of memory that is none or that no pass would meet,
            or an output that is no place for an artifact.
    """
    check_output(Path(output))
    if stop_after is not None and stop_after not in STAGES:
        raise UserError(f"there is no stage {stop_after!r}; the stages are {', '.join(STAGES)}")
    names = [target] if isinstance(target, str) else list(target)
    return Options(
        output=Path(output),
        targets=parse_targets(names),
        asked=tuple(names),
        passes=chosen_passes(opt_level, passes, disable_passes, max_memory, known_route(route)),
        max_memory=max_memory,
        tune=tune,
        route=route,
        entry_points=tuple(entry_points) if entry_points is not None else None,
        dump_dir=Path(dump_dir) if dump_dir is not None else None,
        stop_after=stop_after,
        cache=default_store() if cache else None,
        on_stage=on_stage or (lambda name: nullcontext()),
        on_measuring=on_measuring,
    )
