"""Reductions whose results are read as rows and as columns of one result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.passes.module.keep_reductions_apart import KeepReductionsApart
from irongrad.runtime.errors import VerificationError


def _outer(x: Tensor) -> Tensor:
    sums = x.sum(1)
    return x + sums[:, None] * sums


def _distances(x: Tensor) -> Tensor:
    squares = x.square().sum(1)
    return squares[:, None] + squares - 2 * x @ x.T


def _scaled_twice(x: Tensor) -> Tensor:
    sums = x.sum(1)
    return (x / sums[:, None]).exp() * sums


def _both_softmaxes(x: Tensor) -> Tensor:
    rows = x.softmax(1)
    return rows + rows.T


def _in_a_batch(x: Tensor) -> Tensor:
    sums = torch.stack([x, x.sin(), x.cos()]).sum(2)
    return sums[:, :, None] - sums[:, None]


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [_outer, _distances, _scaled_twice, _both_softmaxes, _in_a_batch]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_and_columns_equal_eager(function: Callable[[Tensor], Tensor]) -> None:
    """compile_function compares with eager float64."""
    x = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) + 0.5
    ig.compile_function(lambda x: (function(x).square().mean(), function(x)), (x,), gradients=True)


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.encoder(a) @ self.encoder(b).T


def _loss(scores: Tensor) -> Tensor:
    labels = torch.arange(scores.shape[0])
    return nn.functional.cross_entropy(scores, labels) + nn.functional.cross_entropy(scores.T, labels)


def _contrastive() -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Pairs()
    return ig.TrainStep(
        model=model,
        loss=_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"a": torch.randn(4, 4), "b": torch.randn(4, 4)},
        dynamic={"a": {0: "B"}, "b": {0: "B"}},
    )


def test_a_loss_over_rows_and_columns_trains_at_every_size(tmp_path: Path) -> None:
    session = ig.compile(_contrastive(), tmp_path, entry_points=["train_step"]).load()
    step, numbers = _contrastive(), torch.Generator().manual_seed(1)
    for n in (4, 1, 9, 17, 40):
        a, b = torch.randn(2, n, 4, generator=numbers)
        step.optimizer.zero_grad()
        loss = step.loss(step.model(a, b))
        loss.backward()
        step.optimizer.step()
        np.testing.assert_allclose(session.train_step(a=a.numpy(), b=b.numpy()), loss.item(), rtol=1e-5, atol=1e-6)
    for name, parameter in step.model.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_iree_still_takes_the_sums_of_some_rows_for_those_of_all_columns(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepReductionsApart)
    with pytest.raises(VerificationError):
        ig.compile_function(_outer, (torch.rand(20, 20),))
