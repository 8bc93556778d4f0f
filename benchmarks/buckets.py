"""What buckets cost: in a step, beside the same step compiled for one size, and in compile time and bytes for each.

    python benchmarks/buckets.py [--rounds 41] [--json]

Both artifacts run in one process on one thread, in turn, a block of steps each; a step's time is CPU time of that
thread, which what else the machine does hardly changes, the median over the blocks. The padded batch has a length of
half the bucket's, and is compared with a full batch of the static step: what it computes is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile_time import now
from shapes import batch, loss_of, make_model

# Width of the network and its bucket, of a step of some microseconds and of one of about 5 ms.
STEPS = {"tiny": (8, 2), "5 ms": (160, 32)}
BLOCK = 10e-3  # seconds of one artifact's turn, at least
COUNTS = (1, 2, 4)  # of buckets


@dataclass(frozen=True)
class Overhead:
    """What guards, dispatch and padding add to a step.

    Attributes:
        step: which one.
        batch: whether it is of the bucket's own size, or padded.
        static: microseconds of the same step compiled for the bucket's size only.
        bucketed: microseconds of the step with buckets.
        added: what they add, in microseconds: the median of the differences of blocks that ran side by side.
        least: the difference of each one's fastest block, which other work on the machine disturbs least.
    """

    step: str
    batch: str
    static: float
    bucketed: float
    added: float
    least: float


@dataclass(frozen=True)
class Cost:
    """What a number of buckets costs.

    Attributes:
        buckets: how many; 0 for the static step.
        cpu: seconds of CPU time to compile, of all processes.
        oracle: those of them that the check against float64 took.
        bytes: of the compiled file.
        dispatches: kernel launches in it, of all buckets.
        kernels: of which they are; equal ones are shared.
    """

    buckets: int
    cpu: float
    oracle: float
    bytes: int
    dispatches: int
    kernels: int


def make_step(width: int, length: int, buckets: Sequence[int]):
    """The tagger's training step on one length, or with buckets."""
    import torch

    import irongrad as ig

    model = make_model(width)
    names: dict[str, Any] = {"dynamic": {n: {1: "T"} for n in ("x", "y")}, "buckets": {"T": list(buckets)}}
    optimizer = torch.optim.AdamW(model.parameters())
    return ig.TrainStep(model, loss_of, optimizer, batch(length), **(names if buckets else {}))


def compiled(step, output: Path) -> Cost:
    """Compile, and say what it took."""
    from irongrad.pipeline.driver import build
    from irongrad.pipeline.options import make_options

    oracle = 0.0

    @contextlib.contextmanager
    def on_stage(name: str) -> Iterator[None]:
        nonlocal oracle
        before = now()
        yield
        oracle += (now() - before).own if name == "oracle" else 0.0

    start = now()
    made = build(step, make_options(output, entry_points=("train_step",), cache=False, on_stage=on_stage))
    (counts,) = made.statistics.values()
    (target,) = made.artifact.manifest.targets
    size = made.artifact.manifest.files[target.file].size
    number = len(step.buckets["T"]) if step.buckets else 0
    return Cost(number, (now() - start).cpu, oracle, size, counts.dispatches, counts.kernels)


def overheads(name: str, directory: Path, rounds: int) -> list[Overhead]:
    """Measure one step, full and padded."""
    from irongrad.runtime import Session

    width, length = STEPS[name]
    for kind, buckets in (("static", ()), ("bucketed", (length, 2 * length))):
        compiled(make_step(width, length, buckets), directory / kind)
    static, bucketed = (Session(directory / k, device="local-sync") for k in ("static", "bucketed"))
    full, part = ({n: t.numpy() for n, t in batch(size).items()} for size in (length, length // 2))
    runs = [lambda: static.train_step(**full), lambda: bucketed.train_step(**full), lambda: bucketed.train_step(**part)]
    alone, own, padded = zip(*(turn(runs) for _ in range(rounds)), strict=True)
    rows = []
    for which, times in (("full", own), ("padded", padded)):
        added = statistics.median(t - a for t, a in zip(times, alone, strict=True))
        middle, least = statistics.median(times), min(times) - min(alone)
        rows.append(Overhead(name, which, statistics.median(alone), middle, added, least))
    return rows


def turn(runs: Sequence[Callable[[], object]]) -> list[float]:
    """The microseconds of a step of each, a block of steps one after the other."""
    return [1e6 * _seconds(run) for run in runs]


def _seconds(run: Callable[[], object]) -> float:
    run()  # the others' data have taken its place in the processor's caches
    start, count = time.thread_time(), 0
    while (spent := time.thread_time() - start) < BLOCK or not count:
        run()
        count += 1
    return spent / count


def costs(directory: Path) -> list[Cost]:
    """Compile the tiny step without buckets and with several numbers of them."""
    width, length = STEPS["tiny"]
    lists = [[length * 2**i for i in range(count)] for count in COUNTS]
    return [compiled(make_step(width, length, sizes), directory / str(len(sizes))) for sizes in ([], *lists)]


def main() -> None:
    """Measure, and print tables, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        added = [row for step in STEPS for row in overheads(step, directory / step, options.rounds)]
        paid = costs(directory)
    if options.json:
        print(json.dumps({"overhead": [asdict(r) for r in added], "cost": [asdict(r) for r in paid]}, indent=2))
        return
    table = Table("step", "batch", "static us", "with buckets us", "added us", "added %", "least us")
    for row in added:
        times = (f"{t:.1f}" for t in (row.static, row.bucketed, row.added))
        table.add_row(row.step, row.batch, *times, f"{100 * row.added / row.static:.1f}", f"{row.least:.1f}")
    Console().print(table)
    table = Table("buckets", "compile CPU s", "of that the oracle", "KiB", "dispatches", "kernels")
    for row in paid:
        seconds = (f"{t:.2f}" for t in (row.cpu, row.oracle))
        table.add_row(str(row.buckets), *seconds, f"{row.bytes / 1024:.0f}", str(row.dispatches), str(row.kernels))
    Console().print(table)


if __name__ == "__main__":
    main()
