"""What `--tune` gains: python benchmarks/tuning.py [--family gpt] [--size small] [--seconds 300] [--rounds 40]

Each step is compiled with `--tune` and without. `check` is what the compiler's own check of the whole step finds: the
median of the ratios of the tuned to the untuned time by the clock, and its bound. If the tuned step is kept, both steps
then run in turns on one thread. These times are of the process's CPU, so that other work matters less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from step_time import CASES, make_step, measured_cases

import irongrad as ig
import irongrad.runtime
from irongrad.runtime.manifest import TUNED


@dataclass(frozen=True)
class Row:
    """One family at one size.

    Attributes:
        family: the example.
        size: its size.
        seconds: how long both compilations took, with what they measured.
        measured: the number of computations that were measured.
        left_out: the number of computations for which no time was left.
        changed: the forms that are not the default, by computation.
        check: the median and the bound of the compiler's check; nothing if all forms are the default ones.
        kept: what the compiler keeps, `tuned` or `untuned`.
        milliseconds: the CPU time of an untuned and of a tuned step, medians; nothing if the untuned one is kept.
        ratio: the median of the ratios of the tuned to the untuned CPU time in a round; 1 if the untuned one is kept.
    """

    family: str
    size: str
    seconds: float
    measured: int
    left_out: int
    changed: dict[str, str]
    check: tuple[float, ...]
    kept: str
    milliseconds: tuple[float, ...]
    ratio: float


def measure(family: str, size: str, rounds: int, seconds: str) -> Row:
    """Measure one case."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        start = time.perf_counter()
        tuned, untuned = directory / "tuned", directory / "untuned"
        chosen = {"entry_points": ("train_step",), "cache": False}
        made = make_step(family, CASES[family][size])
        manifest = ig.compile(made, tuned, tune=True, tune_seconds=int(seconds), **chosen).manifest
        took = time.perf_counter() - start
        tuning = manifest.tuning
        changed = {c.what: c.chosen for c in manifest.tuned if c.chosen != c.default}
        check = (tuning.step.ratio, tuning.step.bound) if tuning.step else ()
        found = []
        if tuning.kept == TUNED:
            ig.compile(make_step(family, CASES[family][size]), untuned, **chosen)
            inputs = {n: t.numpy() for n, t in made.inputs.items()}
            sessions = [irongrad.runtime.load(one, device="local-sync") for one in (untuned, tuned)]
            runs = [lambda session=session: session.train_step(**inputs) for session in sessions]
            found = [[1e3 * _seconds(run) for run in runs] for _ in range(rounds + 1)][1:]
        medians = tuple(statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(t / u for u, t in found) if found else 1.0
        left = tuning.left_out
        return Row(family, size, took, tuning.measured, left, changed, check, tuning.kept, medians, ratio)


def _seconds(run: Callable[[], object]) -> float:
    """The CPU time of a step: the mean of as many as take about a tenth of a second."""
    start = time.process_time()
    run()
    count = max(1, int(0.1 / (time.process_time() - start)))
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def main() -> None:
    """Measure every chosen case and print a table, or JSON."""
    rows = measured_cases(__doc__, measure, 40, seconds="300")
    print("| step | measured | left out | changed | check: ratio, bound | kept | untuned, ms | tuned, ms | ratio |")
    print("| --- | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: |")
    for row in rows:
        check = ", ".join(f"{x:.3f}" for x in row.check) or "-"
        times = [f"{x:.2f}" for x in row.milliseconds] or ["-", "-"]
        cells = [row.measured, row.left_out, len(row.changed), check, row.kept, *times, f"{row.ratio:.3f}"]
        print(f"| {row.family} {row.size} |", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
