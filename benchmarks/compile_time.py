"""Seconds to a first training step: IronGrad's stages, and torch.compile's first step, side by side.

    python benchmarks/compile_time.py [--family gpt] [--size small] [--rounds 3] [--json]

Each compiles in a fresh process with empty caches, in turn, after a small step, which imports what is needed; times are
medians over the rounds, from the imported model to the end of the first step. Wall-clock seconds depend on what else
the machine does; seconds of CPU time, of the process and of all that it starts, hardly do. IronGrad's stages include
the check against eager float64, whose CPU time is that of the stages that it begins beside, `import` to `oracle`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from step_time import CASES, make_step, measured_cases, torch_step

BACKENDS = ("torch.compile", "irongrad")
_CASE = ("family", "size")


@dataclass(frozen=True)
class Seconds:
    """How long something took.

    Attributes:
        wall: by the clock.
        own: CPU time of the process.
        children: CPU time of processes that it started.
    """

    wall: float
    own: float
    children: float

    @property
    def cpu(self) -> float:
        """CPU time in all."""
        return self.own + self.children

    def __sub__(self, before: Seconds) -> Seconds:
        return Seconds(self.wall - before.wall, self.own - before.own, self.children - before.children)


@dataclass(frozen=True)
class Row:
    """One family at one size: medians over the rounds.

    Attributes:
        wall: seconds by the clock, by backend.
        cpu: seconds of CPU time, by backend.
        stages: IronGrad's seconds of CPU time, by stage; `first step` loads the artifact.
        ratio: IronGrad's CPU time in torch.compile's.
    """

    family: str
    size: str
    wall: dict[str, float]
    cpu: dict[str, float]
    stages: dict[str, float]
    ratio: float


def now() -> Seconds:
    """The seconds so far, of processes that still run too: torch.compile keeps a pool of them."""
    own = psutil.Process().cpu_times()
    running = psutil.Process().children(recursive=True)
    children = own.children_user + own.children_system + sum(map(_seconds_of, running))
    return Seconds(time.perf_counter(), own.user + own.system, children)


def _seconds_of(process: psutil.Process) -> float:
    """The CPU time of a process, and of those that it has waited for; 0 if it has ended since it was listed."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def clock(stages: dict[str, float]) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """What adds each stage's CPU time to `stages`: `on_stage` of the compiler's options."""

    @contextlib.contextmanager
    def on_stage(name: str) -> Iterator[None]:
        before = now()
        yield
        spent = now() - before
        # Processes that end while the oracle runs are the compiler's, which runs beside it.
        owner = "compile" if name == "oracle" else name
        stages[name] = stages.get(name, 0.0) + spent.own
        stages[owner] = stages.get(owner, 0.0) + spent.children

    return on_stage


def first_step_of_torch_compile(family: str, size: str, stages: dict[str, float]) -> None:
    """Take a first step with torch.compile."""
    torch_step(family, CASES[family][size], compiled=True)()


def first_step_of_irongrad(family: str, size: str, stages: dict[str, float]) -> None:
    """Compile with IronGrad, load the artifact and take a step; adds each stage's CPU time to `stages`."""
    from irongrad.pipeline.driver import build
    from irongrad.pipeline.options import make_options
    from irongrad.runtime import Session

    on_stage = clock(stages)
    step = make_step(family, CASES[family][size])
    inputs = {n: t.numpy() for n, t in step.inputs.items()}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "artifact"
        build(step, make_options(output, entry_points=("train_step",), cache=False, on_stage=on_stage))
        with on_stage("first step"):
            Session(output).train_step(**inputs)


def warm_up_torch_compile() -> None:
    """Compile a small function: that makes a header and a list of the CPU's features, and imports on the way."""
    import torch

    torch.compile(lambda x: x.exp().sum())(torch.ones(100, requires_grad=True)).backward()


def warm_up_irongrad() -> None:
    """Compile a small step, as decompositions and passes are imported on the way."""
    import torch

    import irongrad as ig

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.zeros(2, 2), "y": torch.zeros(2, 2)}
    step = ig.TrainStep(model=model, loss=torch.nn.functional.mse_loss, optimizer=optimizer, inputs=inputs)
    with tempfile.TemporaryDirectory() as directory:
        ig.compile(step, Path(directory) / "artifact", entry_points=("train_step",), cache=False)


WARM_UP = {"torch.compile": warm_up_torch_compile, "irongrad": warm_up_irongrad}
FIRST_STEP = {"torch.compile": first_step_of_torch_compile, "irongrad": first_step_of_irongrad}


def worker(connection: Connection, backend: str, family: str, size: str) -> None:
    """Answer with the seconds of a first step, and of the stages to it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        make_step(family, CASES[family][size])  # imports what the example does
        WARM_UP[backend]()
        stages: dict[str, float] = {}
        before = now()
        FIRST_STEP[backend](family, size, stages)
        connection.send((now() - before, stages))


def once(backend: str, family: str, size: str) -> tuple[Seconds, dict[str, float]]:
    """Compile in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs, backend, family, size))
    process.start()
    theirs.close()
    answer = mine.recv()
    process.join()
    return answer


def measure(family: str, size: str, rounds: int) -> Row:
    """Measure one case on both, in turn."""
    found = [{backend: once(backend, family, size) for backend in BACKENDS} for _ in range(rounds)]
    wall = {b: statistics.median(f[b][0].wall for f in found) for b in BACKENDS}
    cpu = {b: statistics.median(f[b][0].cpu for f in found) for b in BACKENDS}
    names = found[0]["irongrad"][1]
    stages = {n: statistics.median(f["irongrad"][1][n] for f in found) for n in names}
    ratio = statistics.median(f["irongrad"][0].cpu / f["torch.compile"][0].cpu for f in found)
    return Row(family, size, wall, cpu, stages, ratio)


def main() -> None:
    """Measure every chosen case and print two tables, or JSON."""
    from rich.console import Console
    from rich.table import Table

    rows = measured_cases(__doc__, measure, 3)
    if not rows:
        return
    table = Table(*_CASE, "CPU s, torch.compile", "IronGrad", "ratio", "wall s, torch.compile", "IronGrad")
    for row in rows:
        cpu, wall = ([f"{seconds[b]:.1f}" for b in BACKENDS] for seconds in (row.cpu, row.wall))
        table.add_row(row.family, row.size, *cpu, f"{row.ratio:.2f}", *wall)
    Console().print(table)
    names = list(dict.fromkeys(name for row in rows for name in row.stages))
    stages = Table(*_CASE, *names, title="IronGrad's stages, CPU s")
    for row in rows:
        stages.add_row(row.family, row.size, *(f"{row.stages.get(n, 0.0):.1f}" for n in names))
    Console().print(stages)


if __name__ == "__main__":
    main()
