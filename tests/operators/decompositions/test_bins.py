"""Bucketize, searchsorted and histograms match eager, also for NaN, edges and ties."""

from __future__ import annotations

import math

import pytest
import torch

from irongrad.operators.decompositions import bins

X = torch.tensor([[0.5, 1.0, -3.0, math.nan], [2.0, 7.5, math.inf, 1.0]])


@pytest.mark.parametrize("right", [False, True])
def test_bucketize_and_searchsorted_match_eager(right: bool) -> None:
    edges = torch.tensor([-1.0, 1.0, 1.0, 2.0])
    rows = torch.stack([edges, edges + 1])
    sorter = torch.tensor([[3, 0, 2, 1], [0, 1, 2, 3]])
    unsorted = torch.empty_like(rows).scatter(1, sorter, rows)
    assert torch.equal(bins._bucketize(X, edges, right=right), torch.bucketize(X, edges, right=right))
    assert torch.equal(bins._searchsorted(rows, X, right=right), torch.searchsorted(rows, X, right=right))
    found = bins._searchsorted(unsorted, X, right=right, sorter=sorter, out_int32=True)
    assert torch.equal(found, torch.searchsorted(unsorted, X, right=right, sorter=sorter, out_int32=True))


@pytest.mark.parametrize("limits", [(0.0, 4.0), (0.0, 0.0), (-1.0, 2.0)])
def test_histograms_match_eager(limits: tuple[float, float]) -> None:
    x = torch.randint(-8, 16, (50,), generator=torch.Generator().manual_seed(0)) / 4
    for values in (x, torch.ones(3), torch.empty(0)):
        assert torch.equal(bins._histc(values, 5, *limits), torch.histc(values, 5, *limits))
