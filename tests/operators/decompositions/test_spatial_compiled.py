"""Pooling, interpolation, padding, grids, convolutions and normalisation, compiled and run by IREE.

Compiling compares values and gradients with eager float64, and raises if they differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import irongrad as ig


class Segmenter(nn.Module):
    """Downsamples and upsamples; the tables of windows and weights are constants of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = F.max_pool2d(self.norm(self.down(x)), 3, 2, 1)
        wide = F.interpolate(self.up(small), size=x.shape[2:], mode="bilinear")
        return self.out(wide + F.interpolate(F.avg_pool2d(small, 2), size=x.shape[2:], mode="nearest"))


def test_a_segmenter_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = {"x": torch.randn(2, 3, 9, 8), "y": torch.randint(0, 2, (2, 9, 8))}
    step = ig.TrainStep(model, F.cross_entropy, optimizer, inputs)
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert artifact.reports["llvm-cpu"].passed


def test_compiled_image_resampling_matches_eager() -> None:
    def loss(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        parts = [
            F.interpolate(x, scale_factor=1.7, mode="bicubic"),
            F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True),
            F.interpolate(x, scale_factor=2),
            F.grid_sample(x, grid, "bilinear", "reflection", align_corners=False),
            F.grid_sample(x, grid, "bicubic", "zeros", align_corners=True),
            F.pad(x, (2, -1, -1, 3), mode="replicate"),
            F.fold(F.unfold(x, 3, padding=1, stride=2), x.shape[2:], 3, padding=1, stride=2),
            F.adaptive_max_pool2d(x, (3, 2)),
            F.adaptive_avg_pool2d(x, (3, 2)),
        ]
        return torch.stack([p.square().mean() for p in parts]).sum()

    torch.manual_seed(0)
    ig.compile_function(loss, [torch.randn(2, 3, 7, 6), torch.randn(2, 4, 5, 2)], gradients=True)


def test_compiled_convolutions_of_volumes_match_eager() -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, back: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = F.conv3d(x, weight, stride=(2, 1, 1), padding=1, groups=2)
        y = F.group_norm(y, 2, scale[:4], scale[4:])
        y = F.conv_transpose3d(y, back, stride=(2, 1, 1), output_padding=(1, 0, 0))
        y = F.layer_norm(F.max_pool3d(y, 2, ceil_mode=True), [3, 3])
        return y.square().mean() + F.instance_norm(x).pow(3).mean() + F.rms_norm(x, [4, 4]).sin().mean()

    torch.manual_seed(0)
    shapes = [(2, 4, 4, 4, 4), (4, 2, 2, 3, 3), (4, 2, 2, 3, 3), (8,)]
    ig.compile_function(loss, [torch.randn(s) for s in shapes], gradients=True)


class Normalised(nn.Module):
    """Groups between two functions, so that the input of the groups has a gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape[1], *[1] * (len(shape) - 2)))
        self.norm = nn.GroupNorm(6, shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sin(x * self.scale)))


@pytest.mark.parametrize("shape", [(9, 24), (3, 24, 7), (2, 24, 5, 6), (2, 24, 3, 4, 5)], ids=lambda s: f"{len(s)}-D")
def test_groups_of_any_number_of_dimensions_are_normalised(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normalised(shape)
    inputs = {"x": torch.randn(shape), "y": torch.randn(shape)}
    step = ig.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05), inputs)
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert artifact.reports["llvm-cpu"].passed
