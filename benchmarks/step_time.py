"""Training-step time of IronGrad, eager PyTorch, torch.compile and JAX, side by side.

    python benchmarks/step_time.py [--family gpt] [--size small] [--rounds 7] [--target llvm-cpu:cpu=x86-64-v3] [--json]

Each backend lives in a process of its own, so that their thread pools never meet; the parent asks one after the
other to run a few steps, round by round, so that a change in the machine's speed falls on all of them. The ratios are
medians of per-round ratios to eager: below 1 is faster than eager. Eager's optimizers are fused (`fused=True`) where
PyTorch has such a kernel. JAX compiles the captured step by XLA, as `irongrad compare` does.

`--target` is IronGrad's. With `cpu=x86-64-v3` all others are limited to AVX2, too. The limit of a step is the time of
its products at the peak that `irongrad machine` measures, or of reading and writing its state once at the measured
bandwidth, whichever is longer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Keyword arguments of each example's make_step.
CASES: dict[str, dict[str, dict[str, object]]] = {
    "mlp": {"small": {}, "medium": {"batch": 128, "hidden": 1024}},
    "resnet18": {
        "small": {"batch": 16, "width": 8},
        "medium": {"batch": 16, "width": 32},
        "cifar": {"batch": 8, "width": 64, "image": (3, 32, 32)},
    },
    "rnn": {
        "small": {"batch": 16, "length": 8, "width": 32},
        "medium": {"batch": 32, "length": 16, "width": 128},
        "large": {"batch": 32, "length": 64, "width": 256, "layers": 2},
    },
    "gpt": {
        "small": {"batch": 8, "length": 32, "width": 64, "layers": 2},
        "medium": {"batch": 8, "length": 128, "width": 256, "layers": 4, "heads": 8},
        "large": {"batch": 8, "length": 128, "width": 384, "layers": 4, "heads": 6},
    },
    "moe": {"small": {}, "medium": {"batch": 256, "width": 128, "experts": 8}},
}
SIZES = ("small", "medium", "large", "cifar")
# What limits the other compilers and their libraries to AVX2.
ONLY_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}

K = TypeVar("K")

BACKENDS = ("eager", "torch.compile", "jax", "irongrad")
PEERS = BACKENDS[:-1]


@dataclass(frozen=True)
class Row:
    """One family at one size: medians over the rounds.

    Attributes:
        family: the example.
        size: small or medium.
        milliseconds: of one training step, by backend; the median of the rounds. A backend that fails is missing.
        least: as `milliseconds`, the least of the rounds.
        ratio: to eager's step time, by backend.
        best: to the step time of the fastest of `PEERS` in the same round, of IronGrad.
        limit: the least milliseconds of the step on this machine.
        ready: seconds from an imported model to a first finished step (compilation included), by backend.
    """

    family: str
    size: str
    milliseconds: dict[str, float]
    least: dict[str, float]
    ratio: dict[str, float]
    best: float
    limit: float
    ready: dict[str, float]


def make_step(family: str, arguments: dict[str, object]):
    """Build the example's training step; every process builds the same one."""
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(family).make_step(**arguments)


def torch_step(family: str, arguments: dict[str, object], *, compiled: bool) -> Callable[[], object]:
    """Return a function that takes one eager or torch.compile step."""
    from irongrad.peers.torch_steps import torch_step

    step = make_step(family, arguments)
    if not compiled:
        fuse(step)
    return torch_step(step, compiled=compiled).run


def fuse(step: Any) -> None:
    """Let the optimizers of a step update by PyTorch's fused kernels, where there are any."""
    for group in (g for optimizer in step.optimizers for g in optimizer.param_groups if "fused" in g):
        group["fused"] = True


def jax_step(family: str, arguments: dict[str, object], directory: str) -> Callable[[], object]:
    """Return a function that takes one step compiled by XLA."""
    from irongrad.peers.xla import compiled

    return compiled(make_step(family, arguments), Path(directory), one_thread=False)[1]


def limit_of(directory: Path) -> float:
    """The least milliseconds of the training step of an artifact on this machine."""
    from irongrad.analysis.file import read_analysis
    from irongrad.reports.peaks import machine
    from irongrad.reports.summary import summary_of
    from irongrad.runtime.manifest_file import read_manifest
    from irongrad.runtime.tensor_sizes import size_of

    manifest = read_manifest(directory)
    summary = summary_of(read_analysis(directory, manifest), manifest.targets[0].name, "train_step")
    return 1e3 * machine().seconds(summary.captured.flops or 0, 2 * sum(map(size_of, manifest.state)))


def irongrad_step(family: str, arguments: dict[str, object], directory: str, target: str) -> Callable[[], object]:
    """Return a function that takes one compiled step, as a deployed process would."""
    import irongrad as ig
    from irongrad.runtime import Session

    step = make_step(family, arguments)
    inputs = {n: t.numpy() for n, t in step.inputs.items()}
    ig.compile(step, Path(directory) / "artifact", target, entry_points=("train_step",), cache=False)
    session = Session(Path(directory) / "artifact")
    return lambda: session.train_step(**inputs)


def worker(connection: Connection, backend: str, family: str, arguments: dict[str, object], target: str) -> None:
    """Serve requests to run so many steps, answering with the seconds they took; at first with those until then."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        if backend == "irongrad":
            run = irongrad_step(family, arguments, directory, target)
        elif backend == "jax":
            run = jax_step(family, arguments, directory)
        else:
            run = torch_step(family, arguments, compiled=backend == "torch.compile")
        run()
        connection.send(time.perf_counter() - start)
        if backend == "irongrad":
            connection.send(limit_of(Path(directory) / "artifact"))
        serve(connection, run)


def serve(connection: Connection, run: Callable[[], object]) -> None:
    """Answer each request for so many steps with the seconds of one, until it is for none."""
    while count := connection.recv():
        start = time.perf_counter()
        for _ in range(count):
            run()
        connection.send((time.perf_counter() - start) / count)


def measure(family: str, size: str, rounds: int, target: str) -> Row:
    """Measure one case on all backends, interleaved."""
    context = multiprocessing.get_context("spawn")
    if target.endswith("cpu=x86-64-v3"):
        os.environ |= ONLY_AVX2  # the processes inherit it
    pipes: dict[str, Connection] = {}
    ready: dict[str, float] = {}
    processes = []
    for backend in BACKENDS:
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, backend, family, CASES[family][size], target))
        process.start()
        pipes[backend] = mine
        processes.append(process)
        theirs.close()
        try:
            ready[backend] = mine.recv()
        except EOFError:  # it has said why
            del pipes[backend]
    limit = pipes["irongrad"].recv()
    times = times_in_turn(pipes, rounds)
    for process in processes:
        process.join()
    ratio = {b: statistics.median(t / e for t, e in zip(times[b], times["eager"], strict=True)) for b in pipes}
    medians = {b: 1e3 * statistics.median(t) for b, t in times.items()}
    least = {b: 1e3 * min(t) for b, t in times.items()}
    fastest = map(min, zip(*(times[b] for b in PEERS if b in times), strict=True))
    best = statistics.median(t / f for t, f in zip(times["irongrad"], fastest, strict=True))
    return Row(family, size, medians, least, ratio, best, limit, ready)


def times_in_turn(pipes: Mapping[K, Connection], rounds: int) -> dict[K, list[float]]:
    """The seconds of one step in each round, by contestant; their processes then end."""
    counts = {name: max(2, int(0.3 / ask(pipe, 3))) for name, pipe in pipes.items()}
    times: dict[K, list[float]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            times[name].append(ask(pipe, counts[name]))
    for pipe in pipes.values():
        pipe.send(0)
    return times


def ask(pipe: Connection, count: int) -> float:
    """The seconds of one step, of `count` that the process behind `pipe` takes."""
    pipe.send(count)
    return pipe.recv()


def measured_cases(description: str | None, measure: Callable[..., Any], rounds: int, **more: str) -> list[Any]:
    """What `measure` says of every case that the command line chooses; nothing once it is printed as JSON.

    Args:
        description: of the script.
        measure: takes the family, the size, the number of rounds, and further arguments.
        rounds: how many rounds by default.
        more: further arguments of text, with their defaults.
    """
    from rich.console import Console

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=CASES, action="append")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in more}
    console = Console(stderr=options.json)
    rows = []
    for family in options.family or CASES:
        for size in (s for s in options.size or ("small", "medium") if s in CASES[family]):
            with console.status(f"{family} {size}"):
                rows.append(measure(family, size, options.rounds, **chosen))
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
        return []
    return rows


def main() -> None:
    """Measure every chosen case and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    rows = measured_cases(__doc__, measure, 7, target="llvm-cpu")
    table = Table("family", "size", *BACKENDS, *(f"{b} / eager" for b in BACKENDS[1:]), "/ best", "limit")
    for row in rows:
        times = [f"{row.milliseconds[b]:.2f}" if b in row.milliseconds else "-" for b in BACKENDS]
        ratios = [f"{row.ratio[b]:.2f}" if b in row.ratio else "-" for b in BACKENDS[1:]]
        table.add_row(row.family, row.size, *times, *ratios, f"{row.best:.2f}", f"{row.limit:.2f}")
    if rows:
        Console(width=120).print(table)
        print(f"geometric mean of the ratios to the best: {statistics.geometric_mean(r.best for r in rows):.2f}")


if __name__ == "__main__":
    main()
