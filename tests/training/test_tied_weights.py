"""Ways to train that replace a part of the state, in a model of which two layers share a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.distributed import LocalSteps
from irongrad.runtime import Session, load
from irongrad.runtime.errors import ArtifactError
from irongrad.training import Arrays, Evaluation, train


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Alone:
    """The one rank of a group."""

    rank, size = 0, 1

    def gather(self, row: np.ndarray) -> np.ndarray:
        return row[None]

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """It has the array."""

    def start_sum(self, array: np.ndarray) -> None:
        """It is the sum."""

    def wait(self, request: Any) -> None:
        """Nothing is under way."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    directory = tmp_path_factory.mktemp("tied") / "net"
    ig.compile(ig.TrainStep(model=model, loss=nn.functional.mse_loss, optimizer=optimizer, inputs=inputs), directory)
    return directory


def trained(artifact: Path, **options: Any) -> Session:
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    session = load(artifact)
    train(session, Arrays({"x": x, "y": -x}, 4), epochs=2, **options)
    return session


def test_averages_and_local_steps_train_as_the_plain_loop(tied: Path) -> None:
    plain = trained(tied).state()
    batches = [{"x": np.ones((4, 6), np.float32), "y": np.ones((4, 6), np.float32)}]
    averaged = trained(tied, ema=0.9, evaluation=Evaluation(batches)).state()
    local = trained(tied, sync=LocalSteps(Alone(), 1)).state()
    for name, array in plain.items():
        np.testing.assert_array_equal(averaged[name], array)
        np.testing.assert_allclose(local[name], array, rtol=1e-6, atol=1e-7)


def test_some_tensors_are_replaced_and_all_others_stay(tied: Path) -> None:
    session = load(tied)
    before = session.state()
    weight = np.full((6, 6), 2, np.float32)
    session.update_state({"inner.weight": weight})
    after = session.state()
    for name in before:
        np.testing.assert_array_equal(after[name], weight if name.endswith(".weight") else before[name])
    with pytest.raises(ArtifactError, match="no.weight is unknown"):
        session.update_state({"no.weight": weight})
