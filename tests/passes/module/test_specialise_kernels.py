"""A kernel that takes more constants than IREE can pass: the gradient of an unrolled loop's weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes.module import keep_operands_apart, specialise_kernels
from irongrad.runtime.errors import ArtifactError


class Recurrence(nn.Module):
    """A loop in Python over the columns of `x`, which a trace unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(4)
        for column in range(x.shape[1]):
            hidden = torch.tanh(self.weight @ hidden + x[:, column])
        return hidden


def made() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Recurrence()
    inputs = {"x": torch.randn(4, 100), "y": torch.randn(4)}
    return ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def test_a_long_unrolled_loop_trains_as_eager_does(tmp_path: Path) -> None:
    step = made()
    session = ig.compile(step, tmp_path / "step", entry_points=["train_step"]).load()
    loss = nn.functional.mse_loss(step.model(step.inputs["x"]), step.inputs["y"])
    found = session.train_step(**{n: t.numpy() for n, t in step.inputs.items()})
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)


@pytest.mark.slow
def test_iree_still_limits_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialise_kernels, "_MOST_CONSTANTS", 10000)
    monkeypatch.setattr(keep_operands_apart, "_MOST", 10000)
    with pytest.raises(ArtifactError, match="constants exceeds limit of 64"):
        ig.compile(made(), tmp_path / "step", cache=False)
