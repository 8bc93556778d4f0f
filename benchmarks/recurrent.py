"""Step times of recurrent layers by their sizes: `python benchmarks/recurrent.py`.

IronGrad with and without the pass `loop-kernels`, beside eager PyTorch with its fused AdamW. All run with the same
threads and in turn. A network is an embedding of characters, the layers, and a linear head with cross-entropy.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from in_turn import compiled, medians
from torch import nn

import irongrad as ig
from irongrad.peers.torch_steps import torch_step

CHARACTERS = 65
STEPS = 6


@dataclass(frozen=True)
class Case:
    """A network: the kind and number of its layers, their width, and a batch of sequences."""

    kind: str
    layers: int
    width: int
    batch: int
    length: int


CASES = (
    Case("LSTM", 2, 256, 32, 64),
    Case("LSTM", 2, 256, 32, 512),
    Case("LSTM", 1, 256, 17, 64),
    Case("LSTM", 1, 100, 32, 64),
    Case("LSTM", 1, 200, 32, 64),
    Case("LSTM", 2, 650, 20, 35),
    Case("GRU", 2, 256, 32, 64),
    Case("GRU", 1, 128, 23, 64),
    Case("GRU", 1, 10, 7, 50),
    Case("RNN", 2, 200, 20, 35),
)


class Network(nn.Module):
    """The network of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, case.width)
        self.layers = getattr(nn, case.kind)(case.width, case.width, case.layers, batch_first=True)
        self.head = nn.Linear(case.width, CHARACTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, [batch * length, characters]."""
        return self.head(self.layers(self.embedding(x))[0]).flatten(0, 1)


def make_step(case: Case) -> ig.TrainStep:
    """The step of a case."""
    torch.manual_seed(0)
    model = Network(case)
    shape = case.batch, case.length
    inputs = {"x": torch.randint(CHARACTERS, shape), "y": torch.randint(CHARACTERS, shape).flatten()}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), fused=True), inputs)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| layers | width | batch | length | eager, ms | without kernels, ms | with, ms | with / eager |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                "eager": torch_step(make_step(case), compiled=False).run,
                "without": compiled(make_step(case), Path(folder) / "without", ("loop-kernels",)),
                "with": compiled(make_step(case), Path(folder) / "with"),
            }
            middle = medians(runs, options.rounds, STEPS)
        sizes = f"{case.layers} {case.kind}", *map(str, (case.width, case.batch, case.length))
        cells = [*sizes, *(f"{middle[n]:.2f}" for n in runs), f"{middle['with'] / middle['eager']:.2f}"]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
