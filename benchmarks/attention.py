"""Time and memory of a GPT's training step by the length of its sequence: `python benchmarks/attention.py`.

IronGrad with and without the pass `row-blocks`, beside eager PyTorch with its flash kernel and its fused AdamW. All run
on one thread and in turn. Times are of the process's CPU, so that other work matters less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import irongrad as ig
import irongrad.runtime
from irongrad.peers.torch_steps import torch_step

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import gpt


def make_step(length: int, options: argparse.Namespace) -> ig.TrainStep:
    """The step for one length."""
    torch.manual_seed(0)
    model = gpt.GPT(length, options.width, options.heads, options.layers, options.vocabulary)
    model.head = nn.Linear(options.width, options.vocabulary, bias=False)  # not tied to the embedding
    inputs = {n: torch.randint(0, options.vocabulary, (options.batch, length)) for n in ("x", "y")}
    return ig.TrainStep(model, gpt.loss, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), inputs)


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
            eager = torch_step(make_step(length, options), compiled=False).run
            runs = {"whole": whole, "blocks": blocks, "eager": eager}
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
