"""k grad_steps and an apply_step are one train_step on the k-fold batch, for a model that treats samples alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.golden import key_of, read_golden
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


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulated_batches_are_one_large_batch(tmp_path_factory, steps):
    """The oracle is the large batch's own, eager float64."""
    root = tmp_path_factory.mktemp("accumulation")
    ig.compile(make_step(12), root / "large", entry_points=("train_step",))
    small = ig.compile(make_step(4), root / "small", entry_points=("grad_step", "apply_step")).load()
    golden = read_golden(root / "large" / GOLDEN)
    for _ in range(steps):
        parts = [{n: a[i * 4 : (i + 1) * 4] for n, a in golden.inputs.items()} for i in range(FOLD)]
        losses = [small.grad_step(**part) for part in parts]
        assert small.apply_step() > 0
    assert (
        abs(np.mean(losses) - golden.expected[key_of("loss", steps - 1)]) <= golden.allowed[key_of("loss", steps - 1)]
    )
    state = small.state()
    assert state[STEPS] == steps
    for name, value in state.items():
        key = key_of("state", steps, name)
        assert largest_error(value, golden.expected[key]) <= golden.allowed[key], name
