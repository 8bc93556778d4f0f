"""What the checks of indices cost: a step with them and without them, in turn, in one process.

    python benchmarks/index_checks.py [--family gpt] [--size small] [--rounds 15] [--json]

A step checks its indices before it writes to the state. Both variants run in turn on local-sync. A step's time is the
CPU time of its one thread. The ratio is the median of the rounds' ratios; above 1, the checks cost time.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from step_time import CASES, SIZES, make_step

import irongrad as ig
from irongrad.runtime import Session


@dataclass(frozen=True)
class Row:
    """One family at one size.

    Attributes:
        indices: how many are proved to be in range, and how many are checked (`irongrad inspect` lists them).
        milliseconds: of CPU time, of a step without and with checks.
        ratio: the time with checks in that without, the median over the rounds.
        quartiles: the quartiles of the rounds' ratios.
    """

    family: str
    size: str
    indices: dict[str, int]
    milliseconds: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]


def measure(family: str, size: str, rounds: int) -> Row:
    """Compile a step with and without checks, and run both in turn."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        kinds = compiled(family, size, Path(scratch) / "checks")
        with mock.patch("irongrad.pipeline.front.add_guards", lambda graph, indices, early: graph):
            compiled(family, size, Path(scratch) / "none")
        inputs = {n: t.numpy() for n, t in make_step(family, CASES[family][size]).inputs.items()}
        without, with_them = (stepper(Path(scratch) / name, inputs) for name in ("none", "checks"))
        count = max(2, int(0.5 / timed(with_them, 3)))
        pairs = []
        for number in range(rounds):
            first, second = (without, with_them) if number % 2 else (with_them, without)
            times = {first: timed(first, count), second: timed(second, count)}
            pairs.append((times[without], times[with_them]))
    ratios = [b / a for a, b in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    milliseconds = tuple(1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return Row(family, size, dict(kinds), milliseconds, statistics.median(ratios), (low, high))


def compiled(family: str, size: str, directory: Path) -> Counter[str]:
    """Compile a step; return how many of its indices are proved, and how many are checked."""
    step = make_step(family, CASES[family][size])
    artifact = ig.compile(step, directory, entry_points=["train_step"], cache=False)
    return Counter(index.how for index in artifact.manifest.indices)


def stepper(directory: Path, inputs: dict[str, object]) -> Callable[[], object]:
    """A function that takes a step."""
    session = Session(directory, device="local-sync")
    return lambda: session.train_step(**inputs)


def timed(run: Callable[[], object], count: int) -> float:
    """Seconds of CPU time of one of `count` runs."""
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def main() -> None:
    """Measure every chosen case; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=CASES, action="append")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    families = options.family or ["gpt", "moe"]
    cases = [(f, s) for f in families for s in options.size or CASES[f] if s in CASES[f]]
    rows = []
    for family, size in cases:
        rows.append(row := measure(family, size, options.rounds))
        if not options.json:
            a, b = row.milliseconds
            low, high = row.quartiles
            kinds = ", ".join(f"{count} {how}" for how, count in row.indices.items())
            print(
                f"{family:<8} {size:<8} {kinds}   {a:9.3f} → {b:9.3f} ms   {row.ratio:.4f} ({low:.4f}-{high:.4f})",
                flush=True,
            )
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))


if __name__ == "__main__":
    main()
