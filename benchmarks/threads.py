"""Training-step time with IREE's threads and without them, by how much a kernel computes.

    python benchmarks/threads.py [--family gpt] [--size small] [--rounds 9] [--busy] [--json]

The same artifact runs on local-task, whose threads share every kernel, and on local-sync, which runs kernels one after
the other on the thread that calls; in turn, round by round, medians. With `--busy` another process computes on one core
all the while. The artifact itself names one of the two (docs/artifact.md, "Threads on a CPU").
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from step_time import CASES, make_step, measured_cases

DEVICES = ("local-task", "local-sync")
_SECONDS = 0.1  # of a round


@dataclass(frozen=True)
class Row:
    """One family at one size.

    Attributes:
        family: the example.
        size: its size.
        operations: thousands that a kernel launch computes on average.
        chosen: the device that the artifact names.
        milliseconds: of one training step, by device.
        ratio: of a step without threads to one with them, the median over the rounds.
    """

    family: str
    size: str
    operations: float
    chosen: str
    milliseconds: dict[str, float]
    ratio: float


def measure(family: str, size: str, rounds: int) -> Row:
    """Compile one case and measure it on both devices."""
    from irongrad.pipeline.driver import build
    from irongrad.pipeline.options import make_options
    from irongrad.runtime import Session

    step = make_step(family, CASES[family][size])
    inputs = {n: t.numpy() for n, t in step.inputs.items()}
    with tempfile.TemporaryDirectory() as directory:
        artifact = Path(directory) / "artifact"
        counts = build(step, make_options(artifact, entry_points=("train_step",), cache=False)).statistics["llvm-cpu"]
        sessions = {device: Session(artifact, device=device) for device in DEVICES}
        chosen = Session(artifact).device
        times: dict[str, list[float]] = {device: [] for device in DEVICES}
        steps = {d: max(1, int(_SECONDS / min(_seconds(s, inputs, 1) for _ in range(3)))) for d, s in sessions.items()}
        for _ in range(rounds):
            for device, session in sessions.items():
                times[device].append(_seconds(session, inputs, steps[device]))
    assert counts.work.operations is not None
    ratio = statistics.median(s / t for t, s in zip(*times.values(), strict=True))
    milliseconds = {d: 1e3 * statistics.median(t) for d, t in times.items()}
    return Row(family, size, counts.work.operations / counts.work.launches / 1e3, chosen, milliseconds, ratio)


def _seconds(session, inputs, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        session.train_step(**inputs)
    return (time.perf_counter() - start) / steps


@contextmanager
def another_process() -> Iterator[None]:
    """Have another process compute meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure every chosen case and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--busy", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    with another_process() if options.busy else nullcontext():
        rows = measured_cases(__doc__, measure, 9)
    table = Table("family", "size", "operations a kernel, 1000", "threads ms", "one thread ms", "ratio", "chosen")
    for row in sorted(rows, key=lambda r: r.operations):
        times = [f"{row.milliseconds[d]:.2f}" for d in DEVICES]
        table.add_row(row.family, row.size, f"{row.operations:.0f}", *times, f"{row.ratio:.2f}", row.chosen)
    if rows:
        Console().print(table)


if __name__ == "__main__":
    main()
