"""A stream of batches of random lengths: buckets, one function of any size, one artifact a shape, and torch.compile.

    python benchmarks/shapes.py [--steps 200] [--lengths 6] [--longest 48] [--json]

Every backend is a process of its own; the parent has them take the same batches in turn, a few steps each. What a
backend compiles on the way counts into its total time, as it does for its user: IronGrad's buckets and its function of
any size are compiled before the first step, a static artifact or a graph of torch.compile whenever a shape is new.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BACKENDS = ("buckets", "dynamic", "static", "torch.compile", "eager")
BATCH, WIDTH, WORDS = 8, 64, 200
CHUNK = 10  # steps that a backend takes in turn


@dataclass(frozen=True)
class Row:
    """What the stream took with one backend.

    Attributes:
        backend: its name.
        seconds: in all, compilation included.
        milliseconds: the median of a step.
        compilations: how often something was compiled.
        bytes: of the compiled files; 0 where there are none.
    """

    backend: str
    seconds: float
    milliseconds: float
    compilations: int
    bytes: int


def make_model(width: int = WIDTH):
    """A network that tags every word."""
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.head = nn.Linear(width, WORDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embedding(x)
            h = h + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(h))))
            return self.head(h)

    torch.manual_seed(0)
    return Tagger()


def loss_of(output, y):
    """The mean loss over all words."""
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def batch(length: int) -> dict[str, Any]:
    """The batch of a length."""
    import torch

    generator = torch.Generator().manual_seed(length)
    return {n: torch.randint(0, WORDS, (BATCH, length), generator=generator) for n in ("x", "y")}


class IronGrad:
    """IronGrad with buckets, with one function of any size, or with an artifact a shape."""

    def __init__(self, mode: str, longest: int, directory: Path) -> None:
        self._mode, self._directory, self._sessions = mode, directory, {}
        self.compilations = self.bytes = 0
        self._longest = longest
        if mode != "static":
            self._sessions[0] = self._compiled(longest)

    def _compiled(self, length: int):
        import torch

        import irongrad as ig

        model = make_model()
        names = {} if self._mode == "static" else {"dynamic": {n: {1: "T"} for n in ("x", "y")}}
        buckets = {"buckets": {"T": ig.pow2(8, self._longest)}} if self._mode == "buckets" else {}
        step = ig.TrainStep(model, loss_of, torch.optim.AdamW(model.parameters()), batch(length), **names, **buckets)
        artifact = ig.compile(step, self._directory / str(length), entry_points=("train_step",), cache=False)
        self.compilations += 1
        self.bytes += sum(artifact.manifest.files[t.file].size for t in artifact.manifest.targets)
        return artifact.load()

    def __call__(self, inputs: Mapping[str, Any]) -> float:
        """Take a step."""
        length = inputs["x"].shape[1] if self._mode == "static" else 0
        if length not in self._sessions:
            self._sessions[length] = self._compiled(length)
        return self._sessions[length].train_step(**{n: t.numpy() for n, t in inputs.items()})


class Torch:
    """Eager PyTorch, or torch.compile for dynamic shapes."""

    bytes = 0

    def __init__(self, *, compiled: bool) -> None:
        import torch

        self._model, self._compiled = make_model(), compiled
        self._optimizer = torch.optim.AdamW(self._model.parameters())

        def forward_backward(x, y):
            loss = loss_of(self._model(x), y)
            loss.backward()
            return loss

        self._run = torch.compile(forward_backward, dynamic=True) if compiled else forward_backward
        self._update = torch.compile(self._optimizer.step) if compiled else self._optimizer.step

    @property
    def compilations(self) -> int:
        """The graphs that Dynamo had compiled."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"]) if self._compiled else 0

    def __call__(self, inputs: Mapping[str, Any]) -> float:
        """Take a step."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._run(inputs["x"], inputs["y"])
        self._update()
        return float(loss)


def worker(connection: Connection, backend: str, longest: int) -> None:
    """Serve requests to run batches of the given lengths, answering with the seconds of each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        if backend in ("eager", "torch.compile"):
            run: Any = Torch(compiled=backend == "torch.compile")
        else:
            run = IronGrad(backend, longest, Path(directory))
        connection.send(time.perf_counter() - start)
        while lengths := connection.recv():
            connection.send([_timed(run, batch(length)) for length in lengths])
        connection.send((run.compilations, run.bytes))


def _timed(run: Callable[[Mapping[str, Any]], float], inputs: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    run(inputs)
    return time.perf_counter() - start


def measure(lengths: list[int]) -> list[Row]:
    """Run the stream on every backend, interleaved."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {}
    ready: dict[str, float] = {}
    for backend in BACKENDS:
        pipes[backend], theirs = context.Pipe()
        context.Process(target=worker, args=(theirs, backend, max(lengths)), daemon=True).start()
        theirs.close()  # so that a worker that fails ends the wait for its answer
        ready[backend], times[backend] = pipes[backend].recv(), []
    for start in range(0, len(lengths), CHUNK):
        for backend, pipe in pipes.items():
            pipe.send(lengths[start : start + CHUNK])
            times[backend] += pipe.recv()
    rows = []
    for backend, pipe in pipes.items():
        pipe.send([])
        compilations, size = pipe.recv()
        total = ready[backend] + sum(times[backend])
        rows.append(Row(backend, total, 1e3 * statistics.median(times[backend]), compilations, size))
    return rows


def main() -> None:
    """Measure, and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lengths", type=int, default=6, help="how many different ones there are")
    parser.add_argument("--longest", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = random.Random(0)
    different = [*chosen.sample(range(4, options.longest), options.lengths - 1), options.longest]
    rows = measure([chosen.choice(different) for _ in range(options.steps)])
    if options.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
        return
    table = Table("backend", "total s", "median step ms", "compilations", "compiled KiB")
    for row in rows:
        kib = f"{row.bytes / 1024:.0f}" if row.bytes else ""
        table.add_row(row.backend, f"{row.seconds:.1f}", f"{row.milliseconds:.2f}", str(row.compilations), kib)
    Console().print(table)


if __name__ == "__main__":
    main()
