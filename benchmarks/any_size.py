"""Training-step time of an artifact for any batch size, beside one for a fixed size, eager PyTorch and torch.compile.

    python benchmarks/any_size.py [--family gpt] [--size medium] [--rounds 7] [--json]

The cases are those of `benchmarks/step_time.py`, at their own batch size. torch.compile compiles for any batch size,
too. Each contestant lives in a process of its own, and the parent asks one after the other to run a few steps. The
ratios are medians of per-round ratios to eager.
"""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from in_turn import compiled
from step_time import CASES, fuse, make_step, measured_cases, serve, times_in_turn

CONTESTANTS = ("eager", "torch.compile", "fixed size", "any size")


@dataclass(frozen=True)
class Row:
    """One family at one size: medians over the rounds.

    Attributes:
        family: the example.
        size: small or medium.
        milliseconds: of one training step, by contestant. One that fails is missing.
        ratio: to eager's step time, by contestant.
        ready: seconds until a first finished step, compilation included, by contestant.
    """

    family: str
    size: str
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    ready: dict[str, float]


def peer(family: str, arguments: dict[str, object], *, by_inductor: bool) -> Callable[[], object]:
    """Return a function that takes one step of eager PyTorch, or of torch.compile for any batch size."""
    import torch

    from irongrad.peers.torch_steps import torch_step

    step = make_step(family, arguments)
    if by_inductor:
        for tensor in step.inputs.values():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    else:
        fuse(step)
    return torch_step(step, compiled=by_inductor).run


def ours(family: str, arguments: dict[str, object], directory: str, *, any_size: bool) -> Callable[[], object]:
    """Return a function that takes one step of an artifact."""
    step = make_step(family, arguments)
    if any_size:
        step = replace(step, dynamic={name: {0: "B"} for name in step.inputs})
    return compiled(step, Path(directory) / "artifact")


def worker(connection: Connection, contestant: str, family: str, arguments: dict[str, object]) -> None:
    """Serve requests to run so many steps, answering with the seconds they took; at first with those until then."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        if contestant.endswith("size"):
            run = ours(family, arguments, directory, any_size=contestant == "any size")
        else:
            run = peer(family, arguments, by_inductor=contestant == "torch.compile")
        run()
        connection.send(time.perf_counter() - start)
        serve(connection, run)


def measure(family: str, size: str, rounds: int) -> Row:
    """Measure one case with all contestants, interleaved."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    ready: dict[str, float] = {}
    processes = []
    for contestant in CONTESTANTS:
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, contestant, family, CASES[family][size]))
        process.start()
        processes.append(process)
        theirs.close()
        try:
            ready[contestant] = mine.recv()
            pipes[contestant] = mine
        except EOFError:  # it has said why
            pass
    times = times_in_turn(pipes, rounds)
    for process in processes:
        process.join()
    ratio = {n: statistics.median(t / e for t, e in zip(times[n], times["eager"], strict=True)) for n in pipes}
    return Row(family, size, {n: 1e3 * statistics.median(t) for n, t in times.items()}, ratio, ready)


def main() -> None:
    """Measure every chosen case and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    rows = measured_cases(__doc__, measure, 7)
    table = Table("family", "size", *CONTESTANTS, *(f"{n} / eager" for n in CONTESTANTS[1:]))
    for row in rows:
        times = [f"{row.milliseconds[n]:.2f}" if n in row.milliseconds else "-" for n in CONTESTANTS]
        ratios = [f"{row.ratio[n]:.2f}" if n in row.ratio else "-" for n in CONTESTANTS[1:]]
        table.add_row(row.family, row.size, *times, *ratios)
    if rows:
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
