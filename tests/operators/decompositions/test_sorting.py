"""Sorting by counting gives eager's values and indices; a step with two sorts trains as eager in every entry point."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import sorting
from irongrad.operators.decompositions.sorting import LONGEST_COUNTED
from irongrad.operators.legalize.retrace import retrace

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


@pytest.mark.parametrize("length", [1, 2, LONGEST_COUNTED + 1, 5 * LONGEST_COUNTED])
@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.bool])
def test_sorting_many_equal_values_is_stable(length: int, kind: torch.dtype) -> None:
    """The order is stable, with NaN last, also at lengths that are sorted in runs and merged."""
    numbers = torch.randint(-9, 9, (3, length), generator=torch.Generator().manual_seed(0))
    x = numbers.to(kind)
    if kind is torch.float64:
        x = x.masked_fill(numbers == 3, math.nan).masked_fill(numbers == -9, -math.inf)
    for descending in (False, True):
        expected = x.sort(stable=True, descending=descending)
        assert torch.equal(sorting._stable_sort(x, descending=descending)[1], expected.indices)
        for count in (1, length // 3, length):
            assert torch.equal(sorting._topk(x, count, -1, descending)[1], expected.indices[:, :count])


@pytest.mark.parametrize("missing", [0, 2, 5])
@pytest.mark.parametrize("length", [5, 300])
def test_medians_kth_values_and_modes_match_eager(missing: int, length: int) -> None:
    x = torch.randn(4, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1, :missing] = math.nan
    for ours, eager in (
        (sorting._median_dim(x, 1), x.median(1)),
        (sorting._nanmedian_dim(x, 1), x.nanmedian(1)),
        (sorting._kthvalue(x, 3), x.kthvalue(3)),
        (sorting._mode(x[2:].round()), x[2:].round().mode()),
    ):
        torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=0, equal_nan=True)


class TwoRouters(nn.Module):
    """Two uses of `topk` in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).topk(2).values + 2 * self.second(x).topk(2).values


def test_two_routers_train_as_eager_in_train_step_and_in_train_steps(tmp_path: Path) -> None:
    """Compiling is the test: it compares `train_step` and `train_steps` with eager."""
    torch.manual_seed(0)
    model = TwoRouters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda out: out.square().mean(), optimizer, {"x": torch.randn(16, 8)})
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step", "train_steps"))
    assert artifact.reports["llvm-cpu"].passed
