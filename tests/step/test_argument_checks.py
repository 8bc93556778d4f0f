"""An argument of another kind than `TrainStep` takes is refused with what it is, and what to give instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

import irongrad as ig
from irongrad.runtime.errors import CaptureError

X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refusal(**changed: Any) -> str:
    model = nn.Linear(6, 4)
    given: dict[str, Any] = {
        "model": model,
        "loss": cross_entropy,
        "optimizer": sgd(model),
        "inputs": {"x": X, "y": Y},
        **changed,
    }
    with pytest.raises(CaptureError) as caught:
        ig.TrainStep(**given)
    lines, start = inspect.getsourcelines(refusal)
    assert any(f"{__file__}:{start + n}: " in str(caught.value) for n in range(len(lines)))
    return str(caught.value)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(6, 4)


def in_inference(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def with_a_mask() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].mask = in_inference(lambda: torch.ones(4))
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (in_inference(lambda: nn.Linear(6, 4)), "'weight' of the model was made under torch.inference_mode"),
        (with_a_mask(), "'0.mask' of the model was made under torch.inference_mode"),
        (lambda x: x, "model is a function; it must be a torch.nn.Module"),
        (nn.Linear, "model is the class Linear"),
        (on_meta(), r"'weight' of the model is on the device 'meta'"),
        (nn.Sequential(nn.LazyLinear(4)), "'0.weight' of the model has no shape yet"),
        (nn.LazyBatchNorm1d(affine=False), "'running_mean' of the model has no shape yet"),
    ],
)
def test_a_model(model: Any, says: str) -> None:
    assert says in refusal(model=model)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (nn.CrossEntropyLoss, "loss=CrossEntropyLoss()"),
        ("mse", "loss is a str; it must be a function"),
        (torch.zeros(()), "loss is a Tensor; it must be a function"),
    ],
)
def test_a_loss(loss: Any, says: str) -> None:
    assert says in refusal(loss=loss)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (None, "from the model's parameters"),
        (torch.optim.SGD, "optimizer is a class (SGD)"),
        (lambda parameters: torch.optim.SGD(parameters, 0.1), "from the model's parameters"),
        (StepLR(sgd(nn.Linear(2, 2)), 3), "give the optimizer that it schedules"),
        ([sgd(nn.Linear(2, 2)), "adam"], "optimizer is a str"),
    ],
)
def test_an_optimizer(optimizer: Any, says: str) -> None:
    assert says in refusal(optimizer=optimizer)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (X.numpy(), "torch.from_numpy(x)"),
        (np.float32(3), "torch.from_numpy(x)"),
        ({"ids": X, "mask": X}, "such as 'ids', 'mask'"),
        ((X, X), "such as 'x_0', 'x_1'"),
        ([1, 2, 3], "torch.tensor(x)"),
        (3, "pass torch.tensor(...)"),
        (None, "Leave it out"),
        ("text", "encode it before"),
        (torch.randn(0, 6), "has shape (0, 6), and so no elements"),
        (X.to("meta"), "on the device 'meta'"),
    ],
)
def test_an_input(value: Any, says: str) -> None:
    assert says in refusal(inputs={"x": value, "y": Y})


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((X, Y), "inputs is a tuple; it must be a dictionary"),
        (X, "inputs is a Tensor; it must be a dictionary"),
        ({"self": X, "y": Y}, "the name 'self'"),
        ({1: X, "y": Y}, "input name 1 is not an identifier"),
    ],
)
def test_names_of_inputs(inputs: Any, says: str) -> None:
    assert says in refusal(inputs=inputs)


def half(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **settings: float) -> dict[str, Any]:
    model = nn.Linear(6, 4, dtype=dtype)
    return {"model": model, "optimizer": make(model.parameters(), lr=0.01, **settings)}


def test_an_epsilon_that_the_dtype_of_the_parameters_does_not_hold() -> None:
    message = refusal(**half(torch.optim.AdamW, torch.float16))
    assert "eps of AdamW is 1e-08, which is 0 in torch.float16" in message
    for settings in (
        half(torch.optim.AdamW, torch.float16, eps=1e-4),
        half(torch.optim.AdamW, torch.bfloat16),
        half(torch.optim.SGD, torch.float16),
    ):
        ig.TrainStep(loss=cross_entropy, inputs={"x": X, "y": Y}, **settings)


def test_an_example_without_any_element_is_refused() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert "has shape (0,), and so no elements" in refusal(inputs={"x": empty, "y": empty})


def test_examples_of_inference_mode_are_copied() -> None:
    model = nn.Linear(6, 4)
    x = in_inference(lambda: torch.randn(8, 6))
    step = ig.TrainStep(model, cross_entropy, sgd(model), {"x": x, "y": Y}, entries={"logits": (model, {"x": x})})
    for copied in (step.inputs["x"], step.own_entries["logits"].inputs["x"]):
        assert not copied.is_inference()
        assert torch.equal(copied, x)
    assert step.inputs["y"] is Y


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_value"])
@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1.0", True])
def test_a_limit_of_gradients(name: str, limit: Any) -> None:
    """Zero would stop training, and a negative limit would reverse each update."""
    assert f"{name} is {limit!r}; it must be a positive number" in refusal(**{name: limit})


def test_a_limit_that_numpy_made() -> None:
    model = nn.Linear(6, 4)
    step = ig.TrainStep(model, cross_entropy, sgd(model), {"x": X, "y": Y}, clip_grad_norm=np.float32(0.5))
    assert step.clip_grad_norm == 0.5


def test_a_seed_that_is_no_number() -> None:
    assert "seed is '7'; it must be an integer" in refusal(seed="7")
