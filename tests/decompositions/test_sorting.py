"""Sorting by counting gives eager's values and indices, and two sorts train alike in every entry point."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.decompositions.sorting import LONGEST_COUNTED
from irongrad.pipeline.retrace import retrace

TIED = torch.tensor([[2.0, -math.inf, 2.0, math.nan, -math.inf, math.inf, 0.0], [1.0, 3.0, 2.0, 5.0, 4.0, 0.0, 6.0]])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_sort_matches_eager(dim: int, descending: bool) -> None:
    def sort(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sort(x, stable=True, dim=dim, descending=descending)

    for found, expected in zip(retrace(sort, [TIED])(TIED), sort(TIED), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("largest", [False, True])
def test_topk_matches_eager(largest: bool) -> None:
    x = torch.randperm(5 * LONGEST_COUNTED, generator=torch.Generator().manual_seed(0)).float().reshape(5, -1)
    found = retrace(lambda x: list(x.topk(7, dim=-1, largest=largest)), [x])(x)
    for one, other in zip(found, x.topk(7, dim=-1, largest=largest), strict=True):
        assert torch.equal(one, other)


class TwoRouters(nn.Module):
    """Two uses of `topk` in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).topk(2).values + 2 * self.second(x).topk(2).values


def test_two_routers_train_alike_in_the_module_s_own_loop(tmp_path: Path) -> None:
    """Verification compares `train_step` and `train_steps` with eager; compiling is the test."""
    torch.manual_seed(0)
    model = TwoRouters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda out: out.square().mean(), optimizer, {"x": torch.randn(16, 8)})
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step", "train_steps"))
    assert artifact.reports["llvm-cpu"].passed
