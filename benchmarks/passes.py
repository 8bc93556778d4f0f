"""What each pass brings: nodes, dispatches, bytes moved, compile time and step time, with it and without it.

    python benchmarks/passes.py [--family gpt] [--size small] [--pass cse] [--passes PIPELINE] [--rounds 7] [--json]

A pass of the pipeline is compared with `--disable-pass` of it; another, with the pipeline and it at the end. All
variants of a family are compiled first and then run in turn on local-sync, round by round, so that a change in the
machine's speed falls on all of them. A step's time is the CPU time of its one thread, which other work on the machine
hardly changes; the ratio is the median of the rounds' ratios, below 1 where the pass makes the step faster.
Nodes are those of all functions, before and after the pass; dispatches, transient bytes and the bytes that kernels read
and write are the compiler's plan for the whole module.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from step_time import CASES, EXAMPLES, SIZES


@dataclass(frozen=True)
class Variant:
    """A step compiled with one pipeline.

    Attributes:
        run: takes a step.
        nodes: by pass, how many there were before it and after it.
        dispatches: how many kernels are launched, over all functions.
        transient: bytes that the compiler sets aside for values between dispatches.
        traffic: bytes that the kernels read and write.
        seconds: from the model to the artifact, verification aside.
        milliseconds: of CPU time, of a step, by round.
    """

    run: Callable[[], object]
    nodes: dict[str, tuple[int, int]]
    dispatches: int
    transient: int
    traffic: int
    seconds: float
    milliseconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One pass on one family: nodes before and after it, and the rest without it and with it.

    Attributes:
        ratio: the step time with the pass in that without it, the median over the rounds.
    """

    family: str
    size: str
    name: str
    nodes: tuple[int, int]
    dispatches: tuple[int, int]
    transient: tuple[int, int]
    traffic: tuple[int, int]
    seconds: tuple[float, float]
    milliseconds: tuple[float, float]
    ratio: float


def make_step(family: str, size: str):
    """Build the example's training step."""
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(family).make_step(**CASES[family][size])


def compile_variant(family: str, size: str, passes: Sequence[object], directory: Path) -> Variant:
    """Compile a family's step with `passes`."""
    from irongrad.pipeline.driver import build, make_options
    from irongrad.runtime import Session

    step = make_step(family, size)
    inputs = {n: t.numpy() for n, t in step.inputs.items()}
    options = make_options(directory, passes="", entry_points=("train_step",), cache=False)
    done = build(step, replace(options, passes=tuple(passes)))
    nodes: dict[str, tuple[int, int]] = {}
    for record in done.passes:
        before, after = nodes.get(record.name, (0, 0))
        nodes[record.name] = (before + record.nodes[0], after + record.nodes[1])
    (counts,) = done.statistics.values()
    session = Session(directory, device="local-sync")
    seconds = sum(s for name, s in done.seconds.items() if name != "oracle")
    totals = counts.dispatches, counts.transient_bytes, sum(counts.traffic.values())
    return Variant(lambda: session.train_step(**inputs), nodes, *totals, seconds)


def measure(family: str, size: str, names: Sequence[str], passes: Sequence, rounds: int, say: Callable) -> list[Row]:
    """Compile and run every variant of one family."""
    from irongrad.passes import parse_passes, without

    wanted = names or list(dict.fromkeys(p.name for p in passes))
    pairs = {}
    for name in wanted:
        rest = without(passes, [name])
        pairs[name] = (rest, tuple(passes) if rest != tuple(passes) else (*passes, *parse_passes(name)))
    variants: dict[tuple, Variant] = {}
    with tempfile.TemporaryDirectory() as directory:
        for pipeline in dict.fromkeys(p for pair in pairs.values() for p in pair):
            say(f"{family} {size}: compiling {','.join(p.name for p in pipeline) or 'without passes'}")
            variants[pipeline] = compile_variant(family, size, pipeline, Path(directory) / str(len(variants)))
        time_in_turn(list(variants.values()), rounds, lambda number: say(f"{family} {size}: round {number + 1}"))
        return [row(family, size, name, *(variants[p] for p in pair)) for name, pair in pairs.items()]


def time_in_turn(variants: Sequence[Variant], rounds: int, on_round: Callable[[int], None]) -> None:
    """Add the step time of each round to each variant."""
    count = max(2, int(0.3 / max(timed(v.run, 3) for v in variants)))
    for number in range(rounds):
        on_round(number)
        # From another one each round, so that none always runs after the same neighbour.
        for variant in (*variants[number % len(variants) :], *variants[: number % len(variants)]):
            variant.milliseconds.append(1e3 * timed(variant.run, count))


def timed(run: Callable[[], object], count: int) -> float:
    """Seconds of CPU time of one of `count` runs."""
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def row(family: str, size: str, name: str, without: Variant, with_it: Variant) -> Row:
    """What the pass `name` brings."""
    both = (without, with_it)
    pairs = zip(with_it.milliseconds, without.milliseconds, strict=True)
    return Row(
        family,
        size,
        name,
        nodes=with_it.nodes[name],
        dispatches=(without.dispatches, with_it.dispatches),
        transient=(without.transient, with_it.transient),
        traffic=(without.traffic, with_it.traffic),
        seconds=(without.seconds, with_it.seconds),
        milliseconds=tuple(statistics.median(v.milliseconds) for v in both),
        ratio=statistics.median(new / old for new, old in pairs),
    )


def show(console, rows: Sequence[Row]) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(
        "family", "size", "pass", "nodes", "dispatches", "transient, KiB", "moved, KiB", "compile, s", "step, ms",
        "ratio",
        title="without the pass → with it",
    )  # fmt: skip
    for r in rows:
        table.add_row(
            r.family,
            r.size,
            r.name,
            f"{r.nodes[0]} → {r.nodes[1]}",
            f"{r.dispatches[0]} → {r.dispatches[1]}",
            f"{r.transient[0] / 1024:.0f} → {r.transient[1] / 1024:.0f}",
            f"{r.traffic[0] / 1024:.0f} → {r.traffic[1] / 1024:.0f}",
            f"{r.seconds[0]:.1f} → {r.seconds[1]:.1f}",
            f"{r.milliseconds[0]:.2f} → {r.milliseconds[1]:.2f}",
            f"{r.ratio:.2f}",
        )
    console.print(table)


def main() -> None:
    """Measure every chosen family and print a table, or JSON."""
    from rich.console import Console

    from irongrad.passes import DEFAULT_LEVEL, parse_passes, passes_at

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=CASES, action="append")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--pass", dest="names", action="append", default=[], help="a pass to measure; all by default")
    parser.add_argument("--passes", help="the pipeline; that of the default level by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    passes = passes_at(DEFAULT_LEVEL) if options.passes is None else parse_passes(options.passes)
    console = Console(stderr=options.json)
    rows: list[Row] = []
    with console.status("") as status:
        for family in options.family or CASES:
            for size in (s for s in options.size or ("small",) if s in CASES[family]):
                rows += measure(family, size, options.names, passes, options.rounds, status.update)
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
    else:
        show(console, rows)


if __name__ == "__main__":
    main()
