"""k grad_steps and an apply_step equal one train_step on the k-fold batch, if the model treats each sample alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.golden import Golden, key_of, read_golden
from irongrad.runtime.manifest import GOLDEN, STEPS
from irongrad.runtime.verification import largest_error

FOLD = 3


def make_step(batch: int) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ig.TrainStep(
        model, nn.functional.cross_entropy, optimizer, {"input": x[:batch], "y": y[:batch]}, clip_grad_norm=0.5
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """The golden values of the large batch, from eager float64."""
    artifact = ig.compile(make_step(12), tmp_path_factory.mktemp("large") / "a", entry_points=("train_step",))
    return read_golden(artifact.directory / GOLDEN)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Session:
    entry_points = ("grad_step", "apply_step", "reset")
    return ig.compile(make_step(4), tmp_path_factory.mktemp("small") / "a", entry_points=entry_points).load()


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulated_batches_equal_one_large_batch(large: Golden, small: Session, steps: int):
    """The expected values are those of the large batch in eager float64."""
    small.reset()
    for _ in range(steps):
        parts = [{n: a[i * 4 : (i + 1) * 4] for n, a in large.inputs.items()} for i in range(FOLD)]
        losses = [small.grad_step(**part) for part in parts]
        assert small.apply_step() > 0
    key = key_of("loss", steps - 1)
    assert abs(np.mean(losses) - large.expected[key]) <= large.allowed[key]
    state = small.state()
    assert state[STEPS] == steps
    for name, value in state.items():
        key = key_of("state", steps, name)
        assert largest_error(value, large.expected[key]) <= large.allowed[key], name
