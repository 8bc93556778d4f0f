"""Step times of networks of depthwise convolutions: `python benchmarks/depthwise.py`.

IronGrad with and without the pass `depthwise-kernels`, beside eager PyTorch and torch.compile with a fused AdamW. All
run with the same threads and in turn. A network is a few blocks of ConvNeXt (Liu et al., 2022, arXiv:2201.03545) or of
MobileNetV2 (Sandler et al., 2018, arXiv:1801.04381), and a linear head with cross-entropy.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from in_turn import compiled, medians
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.peers.torch_steps import torch_step

STEPS = 4
CLASSES = 10


class ConvNeXt(nn.Module):
    """A block of ConvNeXt: a depthwise convolution, and two linear layers of each position."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.widen, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the shape of `x`, [N, C, H, W]."""
        last = self.norm(self.filter(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.widen(last))).permute(0, 3, 1, 2)


class MobileNet(nn.Module):
    """An inverted residual of MobileNetV2: one depthwise convolution between two of 1x1, with normalisations."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.widen, self.narrow = nn.Conv2d(channels, wide, 1, bias=False), nn.Conv2d(wide, channels, 1, bias=False)
        self.filter = nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (wide, wide, channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the shape of `x`, [N, C, H, W]."""
        first, second, third = self.norms
        inner = F.hardswish(second(self.filter(F.hardswish(first(self.widen(x))))))
        return x + third(self.narrow(inner))


@dataclass(frozen=True)
class Case:
    """A network: the kind of its blocks, channels, size of the kernels, and a batch of square images."""

    kind: type[nn.Module]
    channels: int
    kernel: int
    batch: int
    size: int
    blocks: int = 3


CASES = (
    Case(ConvNeXt, 48, 7, 16, 16),
    Case(ConvNeXt, 96, 7, 8, 28),
    Case(MobileNet, 24, 3, 16, 32),
    Case(MobileNet, 64, 5, 16, 14),
)


def make_step(case: Case) -> ig.TrainStep:
    """The step of a case."""
    torch.manual_seed(0)
    blocks = [case.kind(case.channels, case.kernel) for _ in range(case.blocks)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(case.channels, CLASSES)]
    model = nn.Sequential(nn.Conv2d(3, case.channels, 1), *blocks, *head)
    inputs = {"x": torch.randn(case.batch, 3, case.size, case.size), "y": torch.randint(CLASSES, (case.batch,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), fused=True), inputs)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| blocks | channels | kernel | images | eager, ms | torch.compile, ms | without, ms | with, ms | / best |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = medians(
                {
                    "eager": torch_step(make_step(case), compiled=False).run,
                    "torch.compile": torch_step(make_step(case), compiled=True).run,
                    "without": compiled(make_step(case), Path(folder) / "without", ("depthwise-kernels",)),
                    "with": compiled(make_step(case), Path(folder) / "with"),
                },
                options.rounds,
                STEPS,
            )
        best = min(found["eager"], found["torch.compile"])
        sizes = f"{case.blocks} {case.kind.__name__}", str(case.channels), f"{case.kernel}x{case.kernel}"
        cells = [*sizes, f"{case.batch} x {case.size}x{case.size}", *(f"{found[n]:.2f}" for n in found)]
        print("|", " | ".join([*cells, f"{found['with'] / best:.2f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
