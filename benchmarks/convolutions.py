"""Times of single convolutions with both gradients: `python benchmarks/convolutions.py [name ...]`.

IronGrad with and without the form `windowed` and its kernels, beside eager PyTorch and torch.compile. All run with the
same threads and in turn. A step scales an image, convolves it, takes the mean of the squares, and updates by SGD.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from in_turn import compiled, medians
from torch import nn

import irongrad as ig
from irongrad.passes import DEFAULT_LEVEL, passes_at, spelled
from irongrad.passes.graph.convolutions import Convolutions
from irongrad.peers.torch_steps import torch_step

STEPS = 4

# A pass over IREE's module computes every convolution that a kernel is worth, in whatever form the graph has it.
KERNELS = ("channels-last", "convolution-kernels")


@dataclass(frozen=True)
class Case:
    """A layer of `nn.Conv2d` or `nn.Conv3d`, and its images."""

    layer: type[nn.Module]
    channels: tuple[int, int]
    kernel: int | tuple[int, ...]
    images: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int = 1
    groups: int = 1


CASES = {
    "3x3": Case(nn.Conv2d, (64, 64), 3, (8, 32, 32), padding=1),
    "3x3 of few positions": Case(nn.Conv2d, (512, 512), 3, (4, 7, 7), padding=1),
    "stride 2": Case(nn.Conv2d, (64, 128), 3, (8, 32, 32), stride=2, padding=1),
    "dilation 2": Case(nn.Conv2d, (64, 64), 3, (4, 32, 32), padding=2, dilation=2),
    "1x7": Case(nn.Conv2d, (128, 128), (1, 7), (8, 16, 16), padding=(0, 3)),
    "4x4 of a GAN": Case(nn.Conv2d, (64, 128), 4, (8, 32, 32), stride=2, padding=1),
    "5x5": Case(nn.Conv2d, (32, 64), 5, (32, 14, 14), padding=2),
    "7x7 of an image": Case(nn.Conv2d, (3, 64), 7, (4, 128, 128), stride=2, padding=3),
    "9x9 to an image": Case(nn.Conv2d, (64, 3), 9, (2, 48, 48), padding=4),
    "4 groups": Case(nn.Conv2d, (128, 128), 3, (8, 28, 28), padding=1, groups=4),
    "32 groups": Case(nn.Conv2d, (128, 128), 3, (8, 28, 28), padding=1, groups=32),
    "two of each channel": Case(nn.Conv2d, (32, 64), 3, (8, 32, 32), padding=1, groups=32),
    "3x3x3": Case(nn.Conv3d, (32, 64), 3, (2, 8, 16, 16), padding=1),
    "3x7x7 of a video": Case(nn.Conv3d, (3, 32), (3, 7, 7), (2, 8, 64, 64), stride=(1, 2, 2), padding=(1, 3, 3)),
}


class Layer(nn.Module):
    """A convolution of an image that is computed, so that its gradient is needed, too."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        moves = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation, "groups": case.groups}
        self.layer = case.layer(*case.channels, case.kernel, **moves)
        self.scale = nn.Parameter(torch.ones(case.channels[0], *[1] * (len(case.images) - 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares of the outputs."""
        return self.layer(x * self.scale).square().mean()


def make_step(case: Case) -> ig.TrainStep:
    """The step of a case."""
    torch.manual_seed(0)
    model = Layer(case)
    first, *others = case.images
    inputs = {"x": torch.randn(first, case.channels[0], *others)}
    return ig.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=1e-3), inputs)


def plain_passes() -> str:
    """The passes over the step graph, without the form `windowed`."""
    passes = passes_at(DEFAULT_LEVEL)
    return ",".join(spelled(replace(p, windowed=False) if isinstance(p, Convolutions) else p) for p in passes)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="cases; by default all")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| convolution | eager, ms | torch.compile, ms | without, ms | with, ms | with / without | / best |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in options.names or CASES:
        case = CASES[name]
        torch.compiler.reset()  # else torch.compile takes the next sizes for any sizes, which Inductor cannot compile
        with tempfile.TemporaryDirectory() as folder:
            found = medians(
                {
                    "eager": torch_step(make_step(case), compiled=False).run,
                    "torch.compile": torch_step(make_step(case), compiled=True).run,
                    "without": compiled(make_step(case), Path(folder) / "without", KERNELS, passes=plain_passes()),
                    "with": compiled(make_step(case), Path(folder) / "with"),
                },
                options.rounds,
                STEPS,
            )
        best = min(found["eager"], found["torch.compile"])
        ratios = found["with"] / found["without"], found["with"] / best
        cells = [name, *(f"{found[n]:.2f}" for n in found), *(f"{ratio:.2f}" for ratio in ratios)]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
