"""User methods under names of PyTorch's own methods, such as `train`: left alone, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.modes import mode
from irongrad.runtime.errors import CaptureError


class Fits(nn.Linear):
    """A layer whose `train` fits data, and sets no mode."""

    def train(self, data: torch.Tensor, rate: float = 0.1) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError(f"called with {data} and {rate}")


class Freezes(nn.Sequential):
    """A layer whose `train` keeps its normalisation frozen."""

    def train(self, mode: bool = True) -> Freezes:
        super().train(mode)
        self[0].training = False
        return self


def test_a_train_of_ones_own_is_not_called() -> None:
    model = nn.Sequential(Fits(4, 4), nn.Sequential(nn.Dropout(), Fits(4, 3)))
    with mode(model, training=False):
        assert not any(m.training for m in model.modules())
    assert all(m.training for m in model.modules())


def test_a_train_that_sets_the_mode_is_called() -> None:
    model = nn.Sequential(Freezes(nn.BatchNorm1d(4), nn.Dropout(), Fits(4, 3)))
    for module in model.modules():
        module.training = False
    with mode(model, training=True):
        assert [m.training for m in model[0]] == [False, True, True]


def step_of(model: nn.Module, loss: Callable[..., Any]) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, loss, optimizer, {"x": torch.randn(8, 4), "y": torch.randn(8, 3)})


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward, lambda t: t.backward()])
def test_backward_in_the_loss_is_refused(call: Callable[[torch.Tensor], None]) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        call(output.square().mean())
        return mse_loss(output, y)

    with pytest.raises(CaptureError, match=rf"{__file__}:\d+: .*\n  .* calls backward\(\) itself"):
        capture(step_of(nn.Linear(4, 3), loss))


class NoLength(tuple):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length_is_left_alone() -> None:
    model = nn.Linear(4, 3)
    model.shapes = [NoLength((1, -1))]
    capture(step_of(model, mse_loss))
