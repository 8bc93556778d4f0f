"""Artifacts that many tests share, compiled once a run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session

# The steps here are small: a thread pool slows their eager runs down, several times where the machine is busy.
torch.set_num_threads(1)
# Tests change what compiles, which no key knows of, and leave the user's cache alone.
os.environ["IRONGRAD_CACHE_SIZE"] = "0"


def make_mlp_step(hidden: int = 16, seed: int = 0) -> ig.TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 4))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        inputs={"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))},
    )


@pytest.fixture(scope="session")
def mlp_step() -> ig.TrainStep:
    return make_mlp_step()


@pytest.fixture(scope="session")
def mlp_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with every entry point: an MLP with BatchNorm, cross-entropy and AdamW."""
    directory = tmp_path_factory.mktemp("artifacts") / "mlp"
    ig.compile(make_mlp_step(), directory)
    return directory


@pytest.fixture
def session(mlp_artifact: Path) -> Session:
    return Session(mlp_artifact)


@pytest.fixture
def batches() -> list[dict[str, np.ndarray]]:
    """Twenty batches for `mlp_artifact`."""
    rng = np.random.default_rng(0)
    return [
        {"x": rng.standard_normal((6, 8)).astype(np.float32), "y": rng.integers(0, 4, 6, dtype=np.int64)}
        for _ in range(20)
    ]
