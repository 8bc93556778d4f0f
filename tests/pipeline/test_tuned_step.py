"""The whole step that `--tune` measures, for every kind of artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline import tuned_step
from irongrad.pipeline.tuned_step import step_times
from irongrad.pipeline.tuning_budget import TuningBudget


def whole() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    inputs = {"x": torch.randn(5, 6), "y": torch.randint(0, 4, (5,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2), inputs)


class Guesses(nn.Module):
    """Guesses, of which the loss chooses by what the caller computes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"guess": self.layer(x)}


def in_pieces() -> ig.TrainStep:
    def loss(outputs: dict[str, torch.Tensor], y: torch.Tensor, match: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs["guess"].gather(1, match), y)

    torch.manual_seed(0)
    model = Guesses()
    inputs = {"x": torch.randn(5, 6), "y": torch.randn(5, 2), "match": torch.randint(0, 4, (5, 2))}
    step = ig.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=1e-2), inputs)
    return ig.pieces(step, between=["match"])


@pytest.mark.parametrize(
    ("make_step", "entry_points"),
    [(whole, ("train_steps",)), (in_pieces, ("forward", "finish_step")), (whole, ("grad_step", "apply_step"))],
)
def test_a_step_without_train_step_is_measured(make_step, entry_points, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tuned_step, "_SECONDS", 0.0)  # nine rounds
    artifact = ig.compile(make_step(), tmp_path / "artifact", entry_points=entry_points)
    times = step_times(artifact, artifact, None, TuningBudget(0))
    assert min(times.tuned, times.untuned) > 0
    assert times.ratio <= times.bound
