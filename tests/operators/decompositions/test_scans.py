"""Scans and extremes: values and indices match eager, at lengths scanned in blocks, with ties, infinities, NaN."""

from __future__ import annotations

import math

import pytest
import torch

import irongrad as ig
from irongrad.operators.decompositions import extremes, scans

aten = torch.ops.aten
LENGTHS = [1, 31, 32, 33, 100, 1056, 2500]


def row(length: int) -> torch.Tensor:
    """Numbers with few distinct values, so many of them are equal."""
    return torch.randint(-9, 9, (2, length), generator=torch.Generator().manual_seed(length)).double()


@pytest.mark.parametrize("length", LENGTHS)
def test_cumulative_sums_and_products_match_eager(length: int) -> None:
    x = row(length)
    if length >= scans.SHORTEST_SCANNED:
        assert torch.equal(scans._cumsum(x, 1), x.cumsum(1))
        torch.testing.assert_close(scans._cumprod(x / 9, 1), (x / 9).cumprod(1))
        assert torch.equal(scans._cumsum(x.T.long(), 0), x.T.long().cumsum(0))
    large = x * 100
    large[0, length // 2 :] = -math.inf
    torch.testing.assert_close(scans._logcumsumexp(large, 1), large.logcumsumexp(1))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("special", [0.0, math.nan, math.inf])
def test_extremes_and_their_indices_match_eager(length: int, special: float) -> None:
    x = row(length)
    x[1, length // 2 :: 7] = special
    pairs = [
        (scans._cummax(x, 1), x.cummax(1)),
        (scans._cummin(x, -1), x.cummin(-1)),
        (extremes._value_and_index(aten.amax.default, x, 1, False), x.max(1)),
        (extremes._value_and_index(aten.amin.default, x, 0, True), x.min(0, keepdim=True)),
    ]
    for ours, eager in pairs:
        torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours[1], eager[1])


def test_compiled_scans_match_eager() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, index = x.cummax(0)
        return x.cumsum(0), values, index, x.argmax()

    ig.compile_function(fn, (torch.rand(300, generator=torch.Generator().manual_seed(0)),))
