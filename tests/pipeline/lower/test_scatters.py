"""Writes of a tensor's own elements into the tensor."""

from __future__ import annotations

import pytest
import torch

import irongrad as ig
from irongrad.pipeline.lower import importer
from irongrad.runtime.errors import VerificationError

N = 64
X = torch.linspace(-1, 1, N * 5).reshape(N, 5)
ROWS = torch.arange(N).flip(0).roll(5)
PLACES = torch.arange(N * 5).reshape(N, 5) * 7 % N
NUMBERS = torch.arange(N).roll(3)


def _written(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor]:
    h = x.sin()
    assigned = h.clone()
    assigned[rows] = assigned.clone()
    partly = h.clone()
    partly[0, [1, 1, 3]] += 1
    return [
        x.index_add(0, rows, x),
        h.index_add(0, rows[:32], h[32:]),
        h[:, 0].index_add(0, rows, h[:, 0]),
        h.index_copy(0, rows, h),
        h.index_copy(0, rows, h.double().float()),
        torch.index_put(x, (places, places % 5), x, accumulate=True),
        numbers.index_add(0, numbers, numbers),
        assigned,
        partly,
    ]


def test_a_tensor_is_written_into_itself():
    """Compiling compares the results with eager."""
    ig.compile_function(_written, (X, ROWS, PLACES, NUMBERS))


def test_iree_still_writes_where_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `written_to_copies` is no longer needed."""
    monkeypatch.setattr(importer, "written_to_copies", lambda graph: graph)
    with pytest.raises(VerificationError):
        ig.compile_function(lambda x, rows: x.index_add(0, rows[:32], x[32:]), (X, ROWS))
