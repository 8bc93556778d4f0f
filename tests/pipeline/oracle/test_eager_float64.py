"""Code that asks for float32, or makes tensors of the default dtype, runs in float64 for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.oracle.eager_float64 import eager_float64
from irongrad.runtime.tolerance import SAME_DTYPE, allowed_error

X, LABELS = torch.rand(4, dtype=torch.float64), torch.arange(4)

MADE: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(4),
    "full": lambda: torch.full((4,), 0.5),
    "random": lambda: torch.rand(4),
    "tensor": lambda: torch.tensor([0.1, 0.2]),
    "counted": lambda: torch.arange(0, 1, 0.25),
    "by name": lambda: torch.zeros(4, dtype=torch.float32),
    "by default's name": lambda: torch.zeros(4, dtype=torch.get_default_dtype()),
    "like": lambda: torch.zeros_like(X, dtype=torch.float32),
    "cast": lambda: X.to(torch.float32),
    "cast by method": lambda: X.float(),
    "cast by type": lambda: X.type(torch.float32),
    "divided integers": lambda: LABELS / 3,
    "function of integers": lambda: LABELS.exp(),
    "softmax": lambda: X.softmax(0, dtype=torch.float32),
    "from memory": lambda: torch.from_numpy(torch.ones(3).numpy()),
}


@pytest.mark.parametrize("name", MADE)
def test_the_oracle_makes_float64_tensors(name: str) -> None:
    with eager_float64():
        assert MADE[name]().dtype is torch.float64
    if name != "like":
        assert MADE[name]().dtype is torch.float32


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.arange(3), torch.int64),
        (lambda: X > 0, torch.bool),
        (lambda: torch.ones(3, dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.ones(3, dtype=torch.complex64), torch.complex128),
    ],
)
def test_other_dtypes_stay(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
    with eager_float64():
        assert make().dtype is dtype


def test_a_random_tensor_has_the_same_elements() -> None:
    torch.manual_seed(0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    with eager_float64():
        assert torch.equal(torch.rand(4), drawn.double())


def test_writes_go_to_the_same_tensor_and_leaves_stay_leaves() -> None:
    narrow = torch.ones(3)
    with eager_float64():
        assert narrow.add_(1) is narrow
        leaf = torch.ones(3, requires_grad=True)
    assert leaf.is_leaf
    assert leaf.requires_grad


def test_other_threads_keep_their_dtype() -> None:
    found: list[torch.dtype] = []
    with eager_float64():
        thread = Thread(target=lambda: found.append(torch.ones(3).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32]


class Scaled(torch.autograd.Function):
    """Makes a tensor in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((3,), 2.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full((3, 3), 2.0).diag().diag().mm(gradient.T).T.contiguous()


def loss_with_labels(scores: torch.Tensor) -> torch.Tensor:
    value = nn.functional.binary_cross_entropy(scores.sigmoid(), torch.ones(len(scores), 3))
    return value + nn.functional.mse_loss(Scaled.apply(scores), torch.arange(3) / torch.tensor([3.0]) + scores * 0)


def test_the_oracle_of_a_step_that_makes_its_labels_is_float64(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    inputs = {"x": torch.randn(8, 4)}
    step = ig.TrainStep(model, loss_with_labels, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    artifact = ig.compile(step, tmp_path / "step", entry_points=("train_step",), cache=False)
    (target,) = artifact.manifest.targets
    assert target.certificate.oracle == "float64"


def test_an_oracle_that_rounds_itself_allows_more() -> None:
    exact = torch.ones(3).numpy()
    narrow, wide = (allowed_error(exact, 1e-6, 1e-7, rounded=rounded) for rounded in (False, True))
    assert wide == SAME_DTYPE * narrow
