"""Transient memory against step time, of GPT and of ResNet-18 on CIFAR's shapes, under several memory budgets.

    python benchmarks/memory.py [--family gpt] [--budgets 100% 75% 60% 50%] [--rounds 7] [--json]

Each budget is compiled and run in a process of its own; the parent asks one after the other to run a few steps, round
by round, on local-sync. A step's time is the CPU time of its one thread, which other work on the machine hardly
changes; the ratio is the median of the rounds' ratios to the first budget. One that cannot be met is said so, and left
out. Predicted and compiler's bytes are those of the artifact's
manifest. The peak at run time is the process's largest resident set in three steps over what it was before the artifact
was loaded, less the state: `device.allocator.statistics` of IREE 3.13.0 leaves out what a program allocates in its
queues. The code of the artifact is in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BUDGETS = ("100%", "75%", "60%", "50%")


@dataclass(frozen=True)
class Row:
    """One budget.

    Attributes:
        family: gpt or resnet18.
        budget: what was asked for, a fraction of the bytes without a limit.
        predicted: bytes of `train_step` that IronGrad predicts.
        compiler: bytes of `train_step` that IREE allocates.
        peak: bytes of the process's largest resident set in three steps, less those before loading and the state's.
        milliseconds: of CPU time, of a step.
        ratio: of its time to that of the first budget.
    """

    family: str
    budget: str
    predicted: int
    compiler: int
    peak: int
    milliseconds: float
    ratio: float


def make_step(family: str):
    """The training step of a family."""
    sys.path.insert(0, str(EXAMPLES))
    if family == "gpt":
        import gpt

        return gpt.make_step(batch=8, length=128, width=256, heads=8, layers=4)
    import resnet18
    import torch
    from torch import nn

    import irongrad as ig

    torch.manual_seed(0)
    model = resnet18.ResNet18(64)
    model.stem[0] = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    inputs = {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(0, 10, (8,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), optimizer, inputs)


def build(connection: Connection, family: str, budget: str, directory: Path) -> None:
    """Compile, and send the inputs of a step; or why it cannot be compiled."""
    import irongrad as ig
    from irongrad.runtime.errors import UserError

    step = make_step(family)
    limit = "" if budget == "100%" else budget
    try:
        ig.compile(step, directory, entry_points=("train_step",), max_memory=limit)
    except UserError as error:
        connection.send(str(error))
    else:
        connection.send({n: t.numpy() for n, t in step.inputs.items()})


def serve(connection: Connection, directory: Path, inputs: dict[str, np.ndarray]) -> None:
    """Send what the artifact says and the peak, then run as many steps as asked, answering with CPU seconds a step."""
    from irongrad.runtime import Session

    before = resident_set("VmRSS")
    session = Session(directory, device="local-sync")
    forget_largest_resident_set()
    for _ in range(3):
        session.train_step(**inputs)
    peak = resident_set("VmHWM") - before
    peak -= sum(array.nbytes for array in session.state().values())
    manifest = session.manifest
    assert manifest.memory is not None
    connection.send((manifest.memory.predicted["train_step"], session.target.transients["train_step"], peak))
    while count := connection.recv():
        start = time.process_time()
        for _ in range(count):
            session.train_step(**inputs)
        connection.send((time.process_time() - start) / count)


def resident_set(name: str) -> int:
    """Bytes of this process in memory: now for `VmRSS`, the most since it was last forgotten for `VmHWM` (proc(5))."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def forget_largest_resident_set() -> None:
    """Begin the largest resident set anew, with what is in memory now (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(family: str, budgets: list[str], rounds: int, say: Callable[[str], object]) -> list[Row]:
    """Measure one family under every budget that can be met, interleaved."""
    with tempfile.TemporaryDirectory() as scratch:
        pipes, facts = {}, {}
        for budget in budgets:
            directory = Path(scratch) / budget
            answer = _start(build, family, budget, directory).recv()
            if isinstance(answer, str):
                say(f"{family} {budget}: {answer}")
                continue
            pipes[budget] = _start(serve, directory, answer)
            facts[budget] = pipes[budget].recv()
            predicted, compiler, _ = facts[budget]
            say(f"{family} {budget}: {predicted / 1e6:.1f} MB predicted, {compiler / 1e6:.1f} MB allocated by IREE")
        times: dict[str, list[float]] = {b: [] for b in pipes}
        for _ in range(rounds):
            for budget, pipe in pipes.items():
                pipe.send(2)
                times[budget].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(0)
    first = next(iter(times.values()))
    return [
        Row(
            family,
            budget,
            *facts[budget],
            milliseconds=1e3 * statistics.median(times[budget]),
            ratio=statistics.median(t / f for t, f in zip(times[budget], first, strict=True)),
        )
        for budget in pipes
    ]


def _start(function: Callable[..., None], *arguments: object) -> Connection:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    context.Process(target=function, args=(theirs, *arguments), daemon=True).start()
    return mine


def main() -> None:
    """Measure and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("gpt", "resnet18"), action="append")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    say = Console(stderr=True).print
    families = options.family or ("gpt", "resnet18")
    rows = [r for f in families for r in measure(f, options.budgets, options.rounds, say)]
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
        return
    table = Table("family", "budget", "predicted MB", "compiler MB", "resident MB", "ms", "time ratio")
    for row in rows:
        sizes = [f"{size / 1e6:.1f}" for size in (row.predicted, row.compiler, row.peak)]
        table.add_row(row.family, row.budget, *sizes, f"{row.milliseconds:.1f}", f"{row.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
