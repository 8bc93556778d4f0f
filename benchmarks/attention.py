"""Time and memory of a GPT's training step by the length of its sequence: `python benchmarks/attention.py`.

IronGrad with and without the pass `row-blocks`, beside eager PyTorch with its flash kernel and its fused AdamW. All run
on one thread and in turn. Times are of the process's CPU, so that other work matters less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
import irongrad.runtime


class Block(nn.Module):
    """Attention and a two-layer network, each over a normalised input and added to it: float32 [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shaped as its input."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """int64 [B, T] -> float32 [B, T, vocabulary]."""

    def __init__(self, length: int, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit a next token, at every place."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every place."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_step(length: int, options: argparse.Namespace) -> ig.TrainStep:
    """The step for one length."""
    torch.manual_seed(0)
    model = GPT(length, options.width, options.heads, options.layers, options.vocabulary)
    inputs = {n: torch.randint(0, options.vocabulary, (options.batch, length)) for n in ("x", "y")}
    return ig.TrainStep(model, loss, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), inputs)


def compiled(
    length: int, options: argparse.Namespace, directory: Path, *, blocks: bool
) -> tuple[Callable[[], object], int]:
    """A compiled step, and the bytes of its transients."""
    step = make_step(length, options)
    disabled = () if blocks else ("row-blocks",)
    artifact = ig.compile(step, directory, entry_points=("train_step",), disable_passes=disabled, cache=False)
    session = irongrad.runtime.load(directory, device="local-sync")
    inputs = {n: v.numpy() for n, v in step.inputs.items()}
    return lambda: session.train_step(**inputs), artifact.manifest.memory.predicted["train_step"]


def eager(length: int, options: argparse.Namespace) -> Callable[[], object]:
    """The step as eager PyTorch runs it."""
    step = make_step(length, options)
    (optimizer,) = step.optimizers

    def run() -> float:
        optimizer.zero_grad()
        value = loss(step.model(step.inputs["x"]), step.inputs["y"])
        value.backward()
        optimizer.step()
        return value.item()

    return run


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    for name, value in {"batch": 1, "width": 256, "heads": 4, "layers": 2, "vocabulary": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| length | whole, ms | blocks, ms | eager, ms | blocks / eager | whole, MiB | blocks, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            whole, most = compiled(length, options, Path(folder) / "whole", blocks=False)
            blocks, least = compiled(length, options, Path(folder) / "blocks", blocks=True)
            runs = {"whole": whole, "blocks": blocks, "eager": eager(length, options)}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.rounds + 1):
                for name, run in runs.items():
                    start = time.process_time()
                    run()
                    times[name].append(1e3 * (time.process_time() - start))
        middle = {name: statistics.median(found[1:]) for name, found in times.items()}
        cells = [*(f"{middle[n]:.1f}" for n in runs), f"{middle['blocks'] / middle['eager']:.2f}"]
        print("|", " | ".join([str(length), *cells, f"{most / 2**20:.0f}", f"{least / 2**20:.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
