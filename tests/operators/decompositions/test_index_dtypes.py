"""Indices of other integer dtypes than int64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import indexing, scatter
from irongrad.runtime.errors import InternalError

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _written(h: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    h = h * 1
    h[i] += h[i]
    return h


READS: dict[str, Read] = {
    "rows": lambda h, i: h[i],
    "rows counted from the end": lambda h, i: h[-i - 1],
    "elements": lambda h, i: h[i, i % 3][:, None] + h,
    "elements by two dtypes": lambda h, i: h[i, (i % 3).long()][:, None] + h,
    "columns": lambda h, i: h[:, i % 3].sum(1, keepdim=True) + h,
    "written rows": _written,
    "added rows": lambda h, i: (h * 1).index_put((i,), h * 2, accumulate=True),
    "gathered": lambda h, i: h.gather(1, (i % 3)[:, None]) + h,
    "scattered": lambda h, i: h.scatter_add(1, (i % 3)[:, None].expand(h.shape), h * 2),
    "selected": lambda h, i: h.index_select(0, i),
    "looked up": lambda h, i: nn.functional.embedding(i, h, padding_idx=1),
    "in bags": lambda h, i: nn.functional.embedding_bag(i[:, None], h),
}


class Reader(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 3), read

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.read(self.linear(x), i)


def make_step(read: Read, *, buckets: bool = False) -> ig.TrainStep:
    model = Reader(read)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    i = (torch.arange(6) % 4).int()
    names = {n: {0: "B"} for n in "xiy"} if buckets else {}
    inputs = {"x": torch.randn(6, 4), "i": i, "y": torch.randn(6, 3)}
    return ig.TrainStep(
        model, nn.functional.mse_loss, optimizer, inputs, dynamic=names, buckets={"B": [8]} if buckets else {}
    )


@pytest.mark.parametrize("name", READS)
def test_indices_of_32_bits(name: str, tmp_path: Path) -> None:
    """Compiling compares the step with eager PyTorch."""
    ig.compile(make_step(READS[name]), tmp_path / "step", entry_points=("train_step",), cache=False)


@pytest.mark.parametrize("name", ["rows", "written rows"])
def test_indices_of_32_bits_in_a_bucket(name: str, tmp_path: Path) -> None:
    step = make_step(READS[name], buckets=True)
    ig.compile(step, tmp_path / "step", entry_points=("train_step",), cache=False)


def test_torch_mlir_still_compares_integers_of_two_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, torch-mlir is fixed, and `in_int64` can go."""
    for module in (indexing, scatter):
        monkeypatch.setattr(module, "in_int64", list)
    with pytest.raises(InternalError, match=r"arith\.cmpi"):
        ig.compile(make_step(READS["rows"]), tmp_path / "step", entry_points=("train_step",), cache=False)
