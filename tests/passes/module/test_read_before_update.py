"""Steps in which IREE would update a tensor before its other readers, and compute wrong gradients."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes.module.fuse_elementwise import FuseElementwise
from irongrad.passes.module.read_before_update import ReadBeforeUpdate
from irongrad.runtime.errors import VerificationError


class Decoder(nn.Module):
    """An LSTM of two layers, called once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, state = self.lstm(x[:1])
        second, state = self.lstm(x[1:], state)
        return torch.cat([first, second])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def compiled(model: nn.Module, shape: tuple[int, ...], directory: Path) -> None:
    """Compile a step; compilation compares its results with eager PyTorch."""
    inputs = {"x": torch.randn(shape), "y": torch.randn(shape)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    ig.compile(step, directory / "step", entry_points=("train_step",), cache=False)


# Each layer and each shape occurs in the default run; IREE alone fails for a GRU of the first shape.
DEFAULT = [(nn.GRU, (2, 1, 4)), (nn.LSTM, (3, 1, 4)), (nn.RNN, (2, 3, 4))]
OTHERS = [c for c in product([nn.GRU, nn.LSTM, nn.RNN], [(2, 1, 4), (3, 1, 4), (2, 3, 4)]) if c not in DEFAULT]


@pytest.mark.parametrize(
    ("kind", "shape"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_recurrent_layers_over_few_steps(kind: type[nn.RNNBase], shape: tuple[int, ...], tmp_path: Path) -> None:
    compiled(Recurrent(kind), shape, tmp_path)


def test_a_layer_called_twice(tmp_path: Path, without) -> None:
    compiled(Decoder(), (2, 3, 4), tmp_path / "fused")
    without(FuseElementwise)
    compiled(Decoder(), (2, 3, 4), tmp_path)


@pytest.mark.slow
def test_iree_still_updates_too_early(tmp_path: Path, without) -> None:
    """When this fails, IREE is fixed, and the pass can go."""
    without(ReadBeforeUpdate)
    with pytest.raises(VerificationError):
        compiled(Recurrent(nn.GRU), (2, 1, 4), tmp_path)
    with pytest.raises(VerificationError):
        compiled(Decoder(), (2, 3, 4), tmp_path)
