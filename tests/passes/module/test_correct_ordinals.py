"""Kernels that pack scores of attention over a batch and a length of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes.module.correct_ordinals import CorrectOrdinals
from irongrad.runtime.errors import VerificationError


class Scores(nn.Module):
    """Attention whose scores two products read, one of them in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden


def _compile(path: Path) -> None:
    """Compile for any batch and length; the result is compared with eager at a length of 81, over one tile of 64."""
    torch.manual_seed(0)
    model = Scores()
    sizes = {0: "B", 1: "T"}
    inputs = {"x": torch.randn(4, 40, 16), "y": torch.randn(4, 40, 16)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, dynamic={"x": sizes, "y": sizes})
    ig.compile(step, path, entry_points=("train_step",), cache=False)


def test_scores_longer_than_a_tile_are_packed_whole(tmp_path: Path) -> None:
    _compile(tmp_path / "net")


def test_iree_still_counts_workgroups_by_another_size(tmp_path: Path, without: Callable[[type], None]) -> None:
    """When this fails, IREE is fixed, and `correct-ordinals` can go."""
    without(CorrectOrdinals)
    with pytest.raises(VerificationError, match="disagrees with eager"):
        _compile(tmp_path / "net")
