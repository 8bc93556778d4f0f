"""What each pass brings: nodes, dispatches, bytes, compile time and step time, without it and with it.

    python benchmarks/passes.py [--family gpt] [--size small] [--pass cse] [--opt-level 3] [--rounds 7] [--json]
    python benchmarks/passes.py --pass "rematerialise{max_memory=60%}" --precision bf16

Every registered pass by default: one of the pipeline is compared with `--disable-pass` of it; another, with the
pipeline and it at the end. A pass that changes nothing in a step has no row.

Nodes are those that the importer is given, of all functions; dispatches, transient bytes and the bytes that kernels
read and write are the compiler's plan for the whole module. Compile time is CPU time, of the process and of
iree-compile, from the model to the artifact, the oracle aside; each variant is compiled in a process of its own, all in
turn, as often as `--compiles` says. Then they run in turn on local-sync, round by round, so that a change in the
machine's speed falls on all of them. A step's time is the CPU time of its one thread, which other work on the machine
hardly changes. Ratios are medians of the rounds' ratios, below 1 where the pass makes it faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from compile_time import clock, now
from step_time import CASES, SIZES, make_step

from irongrad.passes import DEFAULT_LEVEL, Pass, PassResult, parse_passes, passes_at, registered, without
from irongrad.passes.pipelines import LEVELS
from irongrad.runtime import Session
from irongrad.step.train_step import PRECISIONS

# Beside the families, a network with pooling, and a model that leaves much to clean up.
STEPS = CASES | {"digits": {"small": {}}, "decoder": {"small": {}}}
# With what options a pass is measured that does nothing by default.
OPTIONS = {"rematerialise": "rematerialise{max_memory=60%}"}


@dataclass(frozen=True)
class Count:
    """A pass at the end of every pipeline, for the manager's count of the nodes."""

    name: ClassVar[str] = "count"

    def run(self, graph, context) -> PassResult:
        """Change nothing."""
        return PassResult(False)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step.

    Attributes:
        inputs: an example batch.
        changed: the passes that changed anything.
        nodes: how many the importer is given.
        dispatches: how many kernels are launched, over all functions.
        transient: bytes that the compiler sets aside for values between dispatches.
        traffic: bytes that the kernels read and write.
        seconds: of CPU time, from the model to the artifact, the oracle aside.
    """

    inputs: dict[str, np.ndarray]
    changed: frozenset[str]
    nodes: int
    dispatches: int
    transient: int
    traffic: int
    seconds: float


@dataclass(frozen=True)
class Variant:
    """A step compiled with one pipeline.

    Attributes:
        compiled: what the compiler says of it.
        run: takes a step.
        seconds: of CPU time, of a compilation, by round.
        milliseconds: of CPU time, of a step, by round.
    """

    compiled: Compiled
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One pass on one family, without it and with it.

    Attributes:
        seconds_ratio: the compile time with the pass in that without it, the median over the rounds.
        ratio: that of the step time.
        quartiles: the quartiles of the rounds' ratios of the step time.
    """

    family: str
    size: str
    precision: str
    name: str
    nodes: tuple[int, int]
    dispatches: tuple[int, int]
    transient: tuple[int, int]
    traffic: tuple[int, int]
    seconds: tuple[float, float]
    seconds_ratio: float
    milliseconds: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class Case:
    """A training step of an example."""

    family: str
    size: str
    precision: str

    def __str__(self) -> str:
        return f"{self.family} {self.size} {self.precision}"

    def compiled(self, passes: Sequence[Pass], directory: Path) -> Compiled:
        """Compile it with `passes` into `directory`."""
        from irongrad.pipeline.driver import build
        from irongrad.pipeline.options import make_options

        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        step = replace(make_step(self.family, STEPS[self.family][self.size]), precision=self.precision)
        stages: dict[str, float] = {}
        options = make_options(directory, passes="", entry_points=("train_step",), cache=False, on_stage=clock(stages))
        before = now()
        done = build(step, replace(options, passes=(*passes, Count())))
        seconds = (now() - before).cpu - stages["oracle"]
        (counts,) = done.statistics.values()
        return Compiled(
            {n: t.numpy() for n, t in step.inputs.items()},
            frozenset(r.name for r in done.passes if r.changed),
            sum(r.nodes[1] for r in done.passes if r.name == Count.name),
            counts.dispatches,
            counts.transient_bytes,
            sum(counts.traffic.values()),
            seconds,
        )


def compile_apart(case: Case, passes: Sequence[Pass], directory: Path) -> Compiled:
    """Compile a step in a process of its own, which has imported the compiler and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["irongrad.pipeline.driver"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(case.compiled, passes, directory).result()


def measure(
    case: Case, chosen: Sequence[Pass], passes: Sequence[Pass], compiles: int, rounds: int, say: Callable[[str], object]
) -> list[Row]:
    """Compile and run every variant of one step."""
    base = tuple(passes)
    variants: dict[tuple[Pass, ...], Variant] = {}
    pairs: dict[str, tuple[Variant, Variant]] = {}

    with tempfile.TemporaryDirectory() as scratch:

        def compiled(pipeline: tuple[Pass, ...], what: str) -> Variant:
            directory = Path(scratch) / str(len(variants))
            found = compile_apart(case, pipeline, directory)
            session = Session(directory, device="local-sync")
            say(f"{case}: {what}, compiled in {found.seconds:.1f} s of CPU")
            made = Variant(found, lambda: session.train_step(**found.inputs), [found.seconds])
            return variants.setdefault(pipeline, made)

        standard = compiled(base, "the pipeline")
        for item in chosen:
            rest = without(base, [item.name])
            if rest == base:
                pairs[item.name] = standard, compiled((*base, item), f"with {item.name}")
            elif item.name in standard.compiled.changed:
                pairs[item.name] = compiled(rest, f"without {item.name}"), standard
        for number in range(1, compiles):
            for pipeline, variant in variants.items():
                again = compile_apart(case, pipeline, Path(scratch) / "again")
                variant.seconds.append(again.seconds)
            say(f"{case}: compiled {number + 1} times")
        time_in_turn(list(variants.values()), rounds)
    return [row(case, name, *pair) for name, pair in pairs.items() if name in pair[1].compiled.changed]


def time_in_turn(variants: Sequence[Variant], rounds: int) -> None:
    """Add the step time of each round to each variant."""
    count = max(2, int(0.3 / max(timed(v.run, 3) for v in variants)))
    for number in range(rounds):
        # From another one each round, so that none always runs after the same neighbour.
        for variant in (*variants[number % len(variants) :], *variants[: number % len(variants)]):
            variant.milliseconds.append(1e3 * timed(variant.run, count))


def timed(run: Callable[[], object], count: int) -> float:
    """Seconds of CPU time of one of `count` runs."""
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def ratios(without: Sequence[float], with_it: Sequence[float]) -> list[float]:
    """By round."""
    return [new / old for old, new in zip(without, with_it, strict=True)]


def row(case: Case, name: str, without: Variant, with_it: Variant) -> Row:
    """What the pass `name` brings."""
    both = (without, with_it)
    steps = ratios(without.milliseconds, with_it.milliseconds)
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    return Row(
        case.family,
        case.size,
        case.precision,
        name,
        nodes=tuple(v.compiled.nodes for v in both),
        dispatches=tuple(v.compiled.dispatches for v in both),
        transient=tuple(v.compiled.transient for v in both),
        traffic=tuple(v.compiled.traffic for v in both),
        seconds=tuple(statistics.median(v.seconds) for v in both),
        seconds_ratio=statistics.median(ratios(without.seconds, with_it.seconds)),
        milliseconds=tuple(statistics.median(v.milliseconds) for v in both),
        ratio=statistics.median(steps),
        quartiles=(low, high),
    )


HEAD = ("nodes", "dispatches", "transient, KiB", "moved, KiB", "compile, s", "ratio", "step, ms", "ratio (quartiles)")
WIDTHS = (12, 12, 15, 18, 14, 6, 18, 18)


def line(first: str, name: str, cells: Sequence[str]) -> str:
    """A line of the table."""
    return f"{first:<20}{name:<16}" + "".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True))


def shown(r: Row) -> str:
    """A row as a line."""
    cells = (
        f"{r.nodes[0]} → {r.nodes[1]}",
        f"{r.dispatches[0]} → {r.dispatches[1]}",
        f"{r.transient[0] / 1024:.0f} → {r.transient[1] / 1024:.0f}",
        f"{r.traffic[0] / 1024:.0f} → {r.traffic[1] / 1024:.0f}",
        f"{r.seconds[0]:.1f} → {r.seconds[1]:.1f}",
        f"{r.seconds_ratio:.2f}",
        f"{r.milliseconds[0]:.3f} → {r.milliseconds[1]:.3f}",
        f"{r.ratio:.2f} ({r.quartiles[0]:.2f}-{r.quartiles[1]:.2f})",
    )
    return line(f"{r.family} {r.size} {r.precision} ", r.name, cells)


def main() -> None:
    """Measure every chosen case; print its rows once it is done, or JSON at the end."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=STEPS, action="append")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--precision", choices=PRECISIONS, default="f32")
    parser.add_argument("--pass", dest="names", action="append", help="a pass to measure; all by default")
    parser.add_argument("--opt-level", type=int, choices=LEVELS, default=DEFAULT_LEVEL)
    parser.add_argument("--passes", help="the pipeline; that of the level by default")
    parser.add_argument("--compiles", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    passes = passes_at(options.opt_level) if options.passes is None else parse_passes(options.passes)
    chosen = parse_passes(",".join(OPTIONS.get(name, name) for name in options.names or registered()))
    progress = Console(stderr=True)
    rows: list[Row] = []
    if not options.json:
        print(line("without → with it", "pass", HEAD))
    for family in options.family or STEPS:
        for size in (s for s in options.size or ("small",) if s in STEPS[family]):
            case = Case(family, size, options.precision)
            rows += (found := measure(case, chosen, passes, options.compiles, options.rounds, progress.print))
            for r in found if not options.json else ():
                print(shown(r), flush=True)
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))


if __name__ == "__main__":
    main()
