"""Tensors over one storage are refused by name if the step writes into one of them, and compiled if it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import CaptureError


class Pair(nn.Module):
    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=trains)
        self.register_buffer("table", torch.linspace(1, 2, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.table[:3] + (self.other if hasattr(self, "other") else 0)


def step_of(model: nn.Module) -> ig.TrainStep:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs)


def refused(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        ig.compile(step_of(model), "unwritten")
    assert f"{__file__}:" in str(caught.value)
    return str(caught.value)


def test_two_parameters_over_one_storage_are_refused() -> None:
    model = Pair()
    model.other = nn.Parameter(model.scale.data)
    assert "'other' and 'scale' share memory" in refused(model)


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = Pair()
    model.register_buffer("other", model.scale.data[1:2])
    assert "share memory" in refused(model)


def test_an_attribute_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = Pair()
    model.other = model.scale.data[1:2]
    assert "share memory" in refused(model)


def test_views_of_a_tensor_that_nothing_writes_are_compiled(tmp_path: Path) -> None:
    model = Pair()
    model.register_buffer("other", model.table[3:6])
    ig.compile(step_of(model), tmp_path / "step", entry_points=["train_step"])


def test_one_parameter_under_two_names_is_compiled(tmp_path: Path) -> None:
    model = Pair()
    model.other = model.scale
    ig.compile(step_of(model), tmp_path / "step", entry_points=["train_step"])


class Held(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.linear.weight, self.scale.data]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.held[0].square().sum() * self.held[1]


def penalised(model: nn.Module) -> ig.TrainStep:
    parameters = list(model.parameters())

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, y) + torch.cat([p.flatten() for p in parameters]).square().sum()

    return replace(step_of(model), loss=loss)


@pytest.mark.parametrize("make", [lambda: step_of(Held()), lambda: penalised(Pair())])
def test_a_parameter_that_the_code_holds_is_the_models_own(make: Callable[[], ig.TrainStep], tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = make()
    session = ig.compile(step, tmp_path / "step", entry_points=["train_step"]).load()
    for _ in range(3):
        session.train_step(**{n: t.numpy() for n, t in step.inputs.items()})
        step.optimizers[0].zero_grad()
        step.loss(step.model(step.inputs["x"]), step.inputs["y"]).backward()
        step.optimizers[0].step()
    for name, value in step.model.state_dict().items():
        np.testing.assert_allclose(session.state()[name], value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
