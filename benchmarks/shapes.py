"""A stream of batches of random lengths: buckets, one function of any size, one artifact a shape, and torch.compile.

    python benchmarks/shapes.py [--model transformer] [--steps 30] [--lengths 6] [--longest 64] [--buckets 4] [--json]

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
class Stream:
    """What is run.

    Attributes:
        model: a name in `MODELS`.
        lengths: of the batches, in order.
        buckets: how many sizes the step with buckets has.
    """

    model: str
    lengths: tuple[int, ...]
    buckets: int


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


def make_transformer(width: int = WIDTH):
    """A Transformer of two layers that tells the next word."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            parts = self.mixed(self.before(h)).unflatten(2, (3, 4, width // 4)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            h = h + self.out(attended.transpose(1, 2).flatten(2))
            return h + self.narrow(functional.gelu(self.wide(self.between(h))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(WORDS, width), nn.Embedding(128, width)
            self.layers = nn.Sequential(Layer(), Layer())
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            return self.head(self.norm(self.layers(h)))

    torch.manual_seed(0)
    return Transformer()


MODELS = {"tagger": make_model, "transformer": make_transformer}


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

    def __init__(self, mode: str, stream: Stream, directory: Path) -> None:
        self._mode, self._stream, self._directory, self._sessions = mode, stream, directory, {}
        self.compilations = self.bytes = 0
        if mode != "static":
            self._sessions[0] = self._compiled(max(stream.lengths))

    def _compiled(self, length: int):
        import torch

        import irongrad as ig

        model = MODELS[self._stream.model]()
        names = {} if self._mode == "static" else {"dynamic": {n: {1: "T"} for n in ("x", "y")}}
        sizes = ig.choose_buckets(self._stream.lengths, max_buckets=self._stream.buckets)
        buckets = {"buckets": {"T": sizes}} if self._mode == "buckets" else {}
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

    def __init__(self, model: str, *, compiled: bool) -> None:
        import torch

        self._model, self._compiled = MODELS[model](), compiled
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


def worker(connection: Connection, backend: str, stream: Stream) -> None:
    """Serve requests to run batches of the given lengths, answering with the seconds of each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        if backend in ("eager", "torch.compile"):
            run: Any = Torch(stream.model, compiled=backend == "torch.compile")
        else:
            run = IronGrad(backend, stream, Path(directory))
        connection.send(time.perf_counter() - start)
        while lengths := connection.recv():
            connection.send([_timed(run, batch(length)) for length in lengths])
        connection.send((run.compilations, run.bytes))


def _timed(run: Callable[[Mapping[str, Any]], float], inputs: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    run(inputs)
    return time.perf_counter() - start


def measure(stream: Stream) -> list[Row]:
    """Run the stream on every backend, interleaved."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {}
    ready: dict[str, float] = {}
    workers = []
    for backend in BACKENDS:
        pipes[backend], theirs = context.Pipe()
        workers.append(context.Process(target=worker, args=(theirs, backend, stream), daemon=True))
        workers[-1].start()
        theirs.close()  # so that a worker that fails ends the wait for its answer
        ready[backend], times[backend] = pipes[backend].recv(), []
    for start in range(0, len(stream.lengths), CHUNK):
        for backend, pipe in pipes.items():
            pipe.send(stream.lengths[start : start + CHUNK])
            times[backend] += pipe.recv()
    rows = []
    for backend, pipe in pipes.items():
        pipe.send([])
        compilations, size = pipe.recv()
        total = ready[backend] + sum(times[backend])
        rows.append(Row(backend, total, 1e3 * statistics.median(times[backend]), compilations, size))
    for process in workers:
        process.join()
    return rows


def main() -> None:
    """Measure, and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lengths", type=int, default=6, help="how many different ones there are")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = random.Random(0)
    different = [
        *chosen.sample(range(min(8, options.longest // 2), options.longest), options.lengths - 1),
        options.longest,
    ]
    lengths = tuple(chosen.choice(different) for _ in range(options.steps))
    rows = measure(Stream(options.model, lengths, options.buckets))
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
