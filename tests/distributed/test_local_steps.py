"""Ranks that train alone for some steps, against one process that computes the same in another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from irongrad.distributed.compression import Rounded
from irongrad.distributed.sync_text import sync_of
from irongrad.runtime.errors import UserError
from tests.fixtures.ranks import Ranks, exchanging

pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
WORKER = Path(__file__).parent / "worker.py"


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_after_every_step_is_a_step_on_all_samples(count: int, sized: Path, ranks: Ranks) -> None:
    for found in ranks(count, WORKER, "mean_every_step", sized):
        assert found["gap"] < 2e-6
        assert found["rounds"] == 8
        assert found["bytes"] == 8 * 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_a_layer_with_two_names_is_averaged_once(tmp_path: Path, ranks: Ranks) -> None:
    twice = nn.Linear(16, 16)
    dims = {"x": {0: "B"}, "y": {0: "B"}}
    artifact = exchanging(
        tmp_path / "tied",
        layers=(twice, nn.Tanh(), twice),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        dynamic=dims,
    )
    for found in ranks(2, WORKER, "mean_every_step", artifact):
        assert found["gap"] < 2e-6
        assert found["bytes"] == found["rounds"] * 4 * (8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4)


def test_the_outer_optimizer_steps_as_torchs(plain: Path, ranks: Ranks) -> None:
    for found in ranks(2, WORKER, "outer_steps", plain):
        assert found["gap"] < 2e-6
        assert found["rounds"] == 3
        assert found["momentum"] == ["outer/0.bias", "outer/0.weight", "outer/2.bias", "outer/2.weight"]


def test_fewer_bytes_lead_nearly_to_the_same_parameters(plain: Path, ranks: Ranks) -> None:
    for found in ranks(2, WORKER, "rounded", plain):
        assert found["bf16"][0] < 0.02
        assert found["int8"][0] < 0.05
        assert found["bf16"][1] == 0.5
        assert found["int8"][1] < 0.27


def test_a_rank_whose_state_differs_is_named(plain: Path, ranks: Ranks) -> None:
    for found in ranks(2, WORKER, "different", plain):
        assert "the state of rank 1 differs from that of rank 0, first in '2.bias'" in found["error"]


class Alone:
    """The one rank of a group."""

    rank, size = 0, 1

    def gather(self, row: np.ndarray) -> np.ndarray:
        return row[None]


FLOATS = arrays(np.float32, st.integers(1, 3000), elements=st.floats(-100, 100, width=32))


@settings(deadline=None)
@given(FLOATS, st.sampled_from(["bf16", "int8"]))
def test_what_rounding_takes_is_given_back(change: np.ndarray, form: str) -> None:
    """After n rounds of the same change, the sum is off by the rounding of one of them, and not of n."""
    summed, total = Rounded(form), np.zeros(change.size)
    for _ in range(5):
        total += summed(Alone(), change)
    quantum = np.abs(change).max() * (2**-8 if form == "bf16" else 1 / 127)
    assert np.abs(total - 5.0 * change).max() <= 1.5 * quantum + 1e-5


@settings(deadline=None)
@given(FLOATS)
def test_bfloat16_is_rounded_as_torch_rounds_it(change: np.ndarray) -> None:
    expected = torch.from_numpy(change).bfloat16().float().numpy()
    assert np.array_equal(Rounded("bf16")(Alone(), change), expected)


@pytest.mark.parametrize(
    "text", ["", "grads", "local", "local:0", "local:x", "diloco:5:fp4", "gradients:3", "local:5:"]
)
def test_text_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="it must be gradients, local:STEPS or diloco:STEPS"):
        sync_of(text, Alone())


@pytest.mark.parametrize("text", ["gradients", "local:1", "diloco:500", "diloco:500:int8", "local:50:bf16"])
def test_text_that_means_something_is_accepted(text: str) -> None:
    sync_of(text, Alone())
