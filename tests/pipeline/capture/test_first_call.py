"""Attributes that only the first forward makes, or that a forward only sets. Reads of an earlier call are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.first_call import called_once
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import CaptureError

Compile = Callable[..., Artifact]
BY_SIZE: dict[Any, torch.Tensor] = {}
BY_TYPE: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.mask: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}
        self.inited = False
        self.register_buffer("bias", None, persistent=False)
        self.register_buffer("mem", torch.zeros(0), persistent=False)


class Caches(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(3.0), persistent=False)
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril()
        if 4 not in self.tables:
            self.tables[4] = torch.arange(4.0)
        if (4, x.dtype) not in BY_SIZE:
            BY_SIZE[4, x.dtype] = torch.linspace(0, 1, 4, dtype=x.dtype)
        if type(x) not in BY_TYPE:
            BY_TYPE[type(x)] = lambda x: x.reshape(len(x), -1)
        x = BY_TYPE[type(x)](self.mask @ x) * self.tables[4] + BY_SIZE[4, x.dtype]
        return self.linear(x) + self.bias


class Grows(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mem = torch.zeros(len(x), 3)
        for _ in range(2):
            self.mem = 0.9 * self.mem + self.linear(x)
        return self.mem


def step_of(model: Remembers) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, mse_loss, optimizer, {"x": torch.randn(8, 4), "y": torch.randn(8, 3)})


@pytest.mark.parametrize("kind", [Caches, Grows])
def test_values_that_the_first_call_caches_exist_before_the_capture(kind: type[Remembers], compiled: Compile) -> None:
    torch.manual_seed(0)
    model = kind()
    compiled(step_of(model), "train_step", "eval_step")
    assert (model.bias, model.mask, model.tables, len(model.mem)) == (None, None, {}, 0)
    assert not BY_SIZE
    assert not BY_TYPE


class OfFirstInput(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            self.bias = x.mean()
        return self.linear(x) + self.bias


class Carries(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            self.bias = torch.zeros(8, 3)
        self.bias = 0.5 * self.bias.detach() + self.linear(x)
        return self.bias


class InitialisesByFlag(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "done"):
            self.linear.bias.data.copy_(-self.linear(x).mean(0))
            self.done = True
        return self.linear(x)


class ReadsLastTime(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        result = h - getattr(self, "last", 0)
        self.last = h.detach()
        return result


class SetsForEvaluation(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.training:
            self.mask = h.detach().mean(0)
            return h
        return h - self.mask


class SetsInEvaluation(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if not self.training:
            self.mask = h.detach().mean(0)
        return h if self.mask is None else h - self.mask


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OfFirstInput, "bias"),
        (Carries, "bias"),
        (InitialisesByFlag, "self.done"),
        (ReadsLastTime, "self.last"),
        (SetsForEvaluation, "self.mask"),
        (SetsInEvaluation, "self.mask"),
    ],
)
def test_a_value_that_an_earlier_call_set_is_refused(kind: type[Remembers], name: str) -> None:
    step = step_of(kind())
    with called_once(step), pytest.raises(CaptureError, match=name):
        capture(step)


class OnlySets(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.attention = h.softmax(1)
        self.terms = [h.square().mean()]
        self.terms.append(h.mean())
        return h * self.attention + sum(self.terms)


def test_an_attribute_that_is_only_set_is_left_out_with_a_warning(compiled: Compile) -> None:
    torch.manual_seed(0)
    model = OnlySets()
    with pytest.warns(UserWarning, match="does not set self.(attention|terms)"):
        compiled(step_of(model), "train_step", "eval_step")
    assert not hasattr(model, "attention")
