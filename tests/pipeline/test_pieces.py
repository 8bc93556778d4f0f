"""Steps in two pieces: the same numbers as in one, and borders that refuse what does not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.pipeline.capture import capture
from irongrad.pipeline.differentiate import differentiate
from irongrad.pipeline.graphs import Function, Value
from irongrad.pipeline.optimizer import add_optimizer
from irongrad.pipeline.pieces import pieces_of
from irongrad.runtime import Session
from irongrad.runtime.errors import CaptureError, GuardError, UserError


class _Slots(nn.Module):
    """Four guesses an image, from BatchNorm and dropout: what a forward draws and measures must reach its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.layers(x)
        return {"guess": self.head(features), "features": features}


def _loss(outputs: dict[str, Tensor], y: Tensor, match: Tensor) -> Tensor:
    return F.mse_loss(outputs["guess"].gather(1, match), y)


def _match(outputs: dict[str, Any], y: Any) -> dict[str, Any]:
    """Each row's targets go to its guesses in the order of their size."""
    guess = np.asarray(outputs["guess"])
    return {"match": np.argsort(guess, axis=1)[:, : y.shape[1]].astype(np.int64)}


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(5, 6, generator=generator), "y": torch.randn(5, 2, generator=generator)}


def _step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Slots()
    inputs = {**_batch(0), "match": torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 0]])}
    step = ig.TrainStep(model, _loss, torch.optim.AdamW(model.parameters(), lr=1e-2), inputs)
    return ig.pieces(step, between=["match"])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pieces") / "slots"
    ig.compile(_step(), directory)
    return directory


@pytest.fixture
def session(artifact: Path) -> Session:
    return Session(artifact)


def test_x(session):
    print([e.signature for e in session.manifest.entry_points])
