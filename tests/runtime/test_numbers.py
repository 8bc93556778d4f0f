"""Inputs of rank 0 may be Python numbers, and the state has tied tensors under all their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.arguments import as_input, as_number
from irongrad.runtime.errors import ArtifactError, GuardError
from irongrad.runtime.manifest import EntryPoint, TensorSpec

ENTRY = EntryPoint("train_step", (), (), (), "")


def number(dtype: str, value: Any) -> Any:
    return as_input(ENTRY, TensorSpec("share", dtype, ()), value)


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        ("float32", 0.1, np.float32(0.1)),
        ("float32", np.float64(0.1), np.float32(0.1)),
        ("float32", 3, 3.0),
        ("float32", True, 1.0),
        ("float32", float("inf"), float("inf")),
        ("float16", np.float32(0.5), 0.5),
        ("bfloat16", 0.1, float(ml_dtypes.bfloat16(0.1))),
        ("bfloat16", 2, 2.0),
        ("int64", 3, 3),
        ("int32", np.int64(-3), -3),
        ("int8", 2.0, 2),
        ("bool", True, True),
        ("bool", 1, True),
        ("complex64", 1 + 2j, 1 + 2j),
    ],
)
def test_a_number_that_the_dtype_holds_is_accepted(dtype: str, value: Any, held: Any) -> None:
    array = number(dtype, value)
    assert (array.shape, array.dtype.name) == ((), dtype)
    assert array == held


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", 0.5),
        ("int64", float("nan")),
        ("int64", 2**63),
        ("int8", 300),
        ("uint8", -1),
        ("bool", 2),
        ("float32", 2**24 + 1),
        ("float32", 1e300),
        ("float32", 1j),
        ("float16", 10**30),
        ("float32", np.datetime64("2020-01-01")),
    ],
)
def test_a_number_that_the_dtype_does_not_hold_is_refused_by_name(dtype: str, value: Any) -> None:
    with pytest.raises(GuardError, match=f"train_step: share is {dtype}, which does not hold"):
        number(dtype, value)


class Tied(nn.Module):
    """A table that is also the weight of the output, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("seen", self.calls)

    def forward(self, i: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.embedding(i)) * scale


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[ig.TrainStep, Path]:
    model = Tied()
    inputs = {"i": torch.arange(8), "scale": torch.tensor(0.5), "y": torch.arange(8)}
    step = ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), inputs)
    directory = tmp_path_factory.mktemp("tied") / "step"
    ig.compile(step, directory, cache=False)
    return step, directory


def test_tied_tensors_have_all_their_names(tied: tuple[ig.TrainStep, Path], tmp_path: Path) -> None:
    step, directory = tied
    session, batch = Session(directory), {"i": np.arange(8), "scale": 0.5, "y": np.arange(8)}
    assert set(step.model.state_dict()) <= set(session.initial_state())
    session.train_step(**batch)
    state = session.state()
    assert set(step.model.state_dict()) <= set(state)
    assert state["head.weight"] is state["embedding.weight"]
    np.testing.assert_array_equal(state["seen"], [1, 1, 1])
    # In the module Adam's counters are one tensor. Only tensors of the model get all their names.
    assert "optimizer/step/head.weight" not in state
    session.save(tmp_path / "saved.safetensors")
    other = Session(directory)
    other.restore(tmp_path / "saved.safetensors")
    assert other.train_step(**batch) == session.train_step(**batch)
    other.load_state(state)
    np.testing.assert_array_equal(other.state()["head.weight"], state["embedding.weight"])
    with pytest.raises(ArtifactError, match=r"head\.weight and embedding\.weight are one tensor"):
        other.load_state(state | {"head.weight": state["head.weight"] + 1})


def test_a_number_is_the_array_of_rank_0(tied: tuple[ig.TrainStep, Path]) -> None:
    session, batch = Session(tied[1]), {"i": np.arange(8), "y": np.arange(8)}
    share = np.float32(0.3)
    losses = [session.eval_step(**batch, scale=value) for value in (0.3, share, np.asarray(share), np.float64(0.3))]
    assert len(set(losses)) == 1
    stacked = {name: np.stack([value] * 2) for name, value in batch.items()}
    one = session.train_steps(**stacked, scale=0.3)
    session.reset()
    np.testing.assert_array_equal(one, session.train_steps(**stacked, scale=np.full(2, share)))
    before = session.state()
    with pytest.raises(GuardError, match="train_step: scale is float32, which does not hold 1e"):
        session.train_step(**batch, scale=1e300)
    with pytest.raises(GuardError, match="train_steps: scale is float32"):
        session.train_steps(**stacked, scale=1e300)
    assert all(np.array_equal(before[name], value) for name, value in session.state().items())


def test_a_function_takes_numbers() -> None:
    scaled = ig.compile_function(lambda x, s: x * s, (torch.ones(3), torch.tensor(2.0)))
    np.testing.assert_array_equal(scaled(np.ones(3, np.float32), 0.5), [0.5] * 3)


@pytest.mark.parametrize("limit", [0.0, -1.0, -1, np.float32(-0.5)])
def test_a_limit_of_gradients_is_positive(limit: Any) -> None:
    with pytest.raises(GuardError, match=f"clip_grad_norm is {limit:g}: it must be positive; inf turns clipping off"):
        as_number(ENTRY, "clip_grad_norm", limit, {"clip_grad_norm"})
    assert as_number(ENTRY, "lr", limit, ()) == limit
    assert as_number(ENTRY, "clip_grad_norm", float("inf"), {"clip_grad_norm"}) == float("inf")
