"""A step's own objects can be trained, and are as before afterwards."""

from __future__ import annotations

import random
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.step.borrow import borrowed, unchanged


class Restless(nn.Module):
    """A model that changes whatever a model can reach."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.log: list[int] = []
        self.row = self.linear.weight.data[0]
        self.register_buffer("rows", self.linear.weight.detach()[1:])
        self.generator = torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(1)
        Restless.calls += 1
        self.seen = x.shape
        noise = torch.rand(3, generator=self.generator) * float(self.numbers.random()) * random.random()
        return self.norm(self.linear(x)) + 1e-3 * noise.to(x.dtype)


def make_step() -> tuple[ig.TrainStep, list[str]]:
    torch.manual_seed(0)
    model, seen = Restless(), list[str]()
    model.linear.weight.register_hook(lambda g: seen.append("gradient"))
    model.linear.bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs), seen


def train(step: ig.TrainStep, dtype: torch.dtype | None) -> float:
    loss = torch.zeros(())
    for _ in range(2):
        step.optimizers[0].zero_grad()
        x, y = (t.to(dtype) if dtype else t for t in step.inputs.values())
        loss = step.loss(step.model(x), y)
        loss.backward()
        step.optimizers[0].step()
    return loss.item()


def test_everything_is_as_before_in_any_dtype() -> None:
    step, seen = make_step()
    model: Restless = step.model
    step.optimizers[0].param_groups[0]["weight_decay"] = 0.1
    weight, attributes = model.linear.weight, dict(vars(model))
    values = {n: t.clone() for n, t in model.state_dict().items()}
    address = weight.data_ptr()
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found = []
    for dtype in (torch.float64, None, torch.float64):
        with borrowed(step, dtype):
            found.append(train(step, dtype))
            assert weight.dtype is (dtype or torch.float32)
            assert torch.equal(model.rows, weight[1:]), "an alias is one no longer"
            assert torch.equal(model.row, weight.data[0])
            assert seen.count("gradient") == seen.count("accumulated") == 2
        assert weight.data_ptr() == address
        assert weight.grad is None
        assert model.rows.data_ptr() == weight[1:].data_ptr()
        assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())
        assert not step.optimizers[0].state
        assert vars(model) == attributes
        assert (model.log, Restless.calls, seen) == ([], 0, [])
    assert found[0] == found[2], "the generators were not put back"
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(generators, after, strict=True)
    )
    assert np.isclose(found[0], found[1], rtol=1e-4)


def test_a_borrowed_step_can_be_trained_afterwards() -> None:
    step, _ = make_step()
    with borrowed(step, torch.float64):
        train(step, torch.float64)
    assert np.isfinite(train(step, None))


def test_a_gradient_from_before_gets_the_dtype_and_is_put_back() -> None:
    step, _ = make_step()
    weight = step.model.linear.weight
    weight.grad = gradient = torch.ones_like(weight)
    with borrowed(step, torch.float64):
        assert weight.grad.dtype is torch.float64
        assert np.isfinite(train(step, torch.float64))
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.ones(3, 4))


def test_everything_is_as_before_after_an_error() -> None:
    step, _ = make_step()
    before = step.model.linear.weight.clone()

    def fail() -> None:
        with borrowed(step):
            train(step, None)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(step.model.linear.weight, before)
    assert step.model.log == []


def test_the_record_says_what_changed() -> None:
    counts = {"calls": 0}
    number = 0

    def count() -> None:
        counts["calls"] += 1

    def name() -> None:
        nonlocal number
        number += 1

    for function, words in ((count, "dictionary"), (name, "variable of an enclosing function"), (len, "")):
        with unchanged([function]) as record:
            function() if function is not len else None
            assert words in record.changed() if words else not record.changed()
    assert (counts, number) == ({"calls": 0}, 0)


class Kind(Enum):
    PLAIN = 1


def test_an_enumeration_of_the_users_is_left_alone() -> None:
    step, _ = make_step()
    step.model.kind = Kind.PLAIN
    train(step, None)
    assert step.model.kind is Kind.PLAIN


def test_a_set_of_many_objects_is_the_same_in_any_order() -> None:
    held = {object() for _ in range(1000)}
    with unchanged([held]) as record:
        assert record.changed() == ""
        held.add(object())
        assert record.changed() == "a set"


def test_a_model_of_a_class_without_a_module_is_put_back() -> None:
    """A class that `exec` makes in an empty namespace says that it is one of Python's builtins."""
    names: dict[str, type[nn.Module]] = {}
    exec("class Made(torch.nn.BatchNorm1d): pass", {"torch": torch}, names)
    model = names["Made"](3)
    assert type(model).__module__ == "builtins"
    step = ig.TrainStep(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": torch.randn(4, 3), "y": torch.randn(4, 3)},
    )
    with borrowed(step):
        model(torch.randn(4, 3))
    assert int(model.num_batches_tracked) == 0
