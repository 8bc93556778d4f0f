"""Step time in float32 and bfloat16, beside Inductor in float32 and under autocast, in turns.

    python benchmarks/precision.py [--family gpt] [--size large] [--rounds 7] [--target llvm-cpu] [--threads 1] [--f16]

Each contestant lives in a process of its own. `without AMX` limits oneDNN, by which Inductor multiplies, to
AVX512_CORE_BF16. The sizes are those of `benchmarks/step_time.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from step_time import CASES, ask, make_step, serve

# The largest size of each family that is measured by default.
SIZES = {"mlp": "medium", "gpt": "large", "resnet18": "cifar"}
LIMITED = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@dataclass(frozen=True)
class Contestant:
    """Who takes a step, and how.

    Attributes:
        compiler: `irongrad` or `Inductor`.
        precision: as `TrainStep` takes it.
        limited: whether oneDNN may not use AMX.
    """

    compiler: str
    precision: str
    limited: bool = False

    def __str__(self) -> str:
        """The name in the table."""
        return f"{self.compiler} {self.precision}{' without AMX' * self.limited}"


BASE = Contestant("irongrad", "f32")
OTHERS = (
    Contestant("irongrad", "bf16"),
    *(Contestant("Inductor", precision) for precision in ("f32", "bf16")),
    Contestant("Inductor", "bf16", limited=True),
)


@dataclass(frozen=True)
class Row:
    """The times of one contestant in one case.

    Attributes:
        family: the example.
        size: a key of `CASES`.
        contestant: its name.
        least: the least milliseconds of a step.
        median: the median of the rounds.
        ratio: the median of the ratios to IronGrad in float32, round by round.
        kib: the size of the .vmfb; None for Inductor.
    """

    family: str
    size: str
    contestant: str
    least: float
    median: float
    ratio: float
    kib: float | None


def step_of(contestant: Contestant, family: str, size: str, target: str, threads: int, directory: Path):
    """A function that takes one step, and the KiB of the .vmfb."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    step = replace(make_step(family, CASES[family][size]), precision=contestant.precision)
    if contestant.compiler == "Inductor":
        from irongrad.peers.torch_steps import torch_step

        return torch_step(step, compiled=True).run, None
    import irongrad as ig
    from irongrad.graph.dtypes import to_numpy
    from irongrad.runtime import Session

    artifact = ig.compile(step, directory / "artifact", target=target, entry_points=("train_step",), cache=False)
    inputs = {name: to_numpy(tensor) for name, tensor in step.inputs.items()}
    session = Session(artifact.directory, device="local-sync" if threads == 1 else None)
    kib = artifact.manifest.files[artifact.manifest.targets[0].file].size / 1024
    return lambda: session.train_step(**inputs), kib


def worker(connection: Connection, *arguments) -> None:
    """Prepare a step, tell the size of its file, then answer each request for so many steps with their seconds."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        run, kib = step_of(*arguments, Path(directory))
        run()
        connection.send(kib)
        serve(connection, run)


def measure(family: str, size: str, options: argparse.Namespace) -> list[Row]:
    """Measure one case."""
    context = multiprocessing.get_context("spawn")
    pipes, kib, processes = {}, {}, []
    for contestant in (BASE, *OTHERS, *[Contestant("irongrad", "f16")] * options.f16):
        mine, theirs = context.Pipe()
        arguments = (theirs, contestant, family, size, options.target, options.threads)
        process = context.Process(target=worker, args=arguments, daemon=True)
        os.environ.update(LIMITED if contestant.limited else {})
        process.start()
        for name in LIMITED:
            os.environ.pop(name, None)
        pipes[contestant], kib[contestant] = mine, mine.recv()
        processes.append(process)

    counts = {contestant: max(1, int(0.3 / ask(pipe, 2))) for contestant, pipe in pipes.items()}
    times: dict[Contestant, list[float]] = {c: [] for c in pipes}
    for _ in range(options.rounds):
        for contestant, pipe in pipes.items():
            times[contestant].append(1e3 * ask(pipe, counts[contestant]))
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(0)
        process.join()
    base = times[BASE]
    rows = []
    for contestant, found in times.items():
        ratio = statistics.median(t / b for t, b in zip(found, base, strict=True))
        middle = statistics.median(found)
        rows.append(Row(family, size, str(contestant), min(found), middle, ratio, kib[contestant]))
    return rows


def main() -> None:
    """Measure every chosen case and print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=CASES, action="append")
    parser.add_argument("--size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", default="llvm-cpu")
    parser.add_argument("--threads", type=int, default=0, help="of every contestant; by default as many as it likes")
    parser.add_argument("--f16", action="store_true", help="measure IronGrad in float16, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [(family, options.size or SIZES.get(family, "small")) for family in options.family or SIZES]
    rows = [row for family, size in cases for row in measure(family, size, options)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print("| family | size | | least, ms | median, ms | to irongrad f32 | .vmfb, KiB |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        size = "" if row.kib is None else f"{row.kib:.0f}"
        times = f"{row.least:.1f} | {row.median:.1f} | {row.ratio:.2f}"
        print(f"| {row.family} | {row.size} | {row.contestant} | {times} | {size} |")


if __name__ == "__main__":
    main()
