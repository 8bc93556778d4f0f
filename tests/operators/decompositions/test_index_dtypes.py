"""Indices of other integer dtypes than int64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import indexing, scatter
from irongrad.runtime.errors import InternalError
from irongrad.runtime.golden import key_of
from irongrad.runtime.report import Comparison

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
    """Each read has a linear layer of its own, whose gradient goes through the read."""

    def __init__(self, reads: Mapping[str, Read]) -> None:
        super().__init__()
        self.linear, self.reads = nn.ModuleDict({name: nn.Linear(4, 3) for name in reads}), reads

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.stack([read(self.linear[name](x), i) for name, read in self.reads.items()])


def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum(nn.functional.mse_loss(part, y) for part in made.unbind())


def make_step(*names: str, buckets: bool = False) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Reader({name: READS[name] for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    i = (torch.arange(6) % 4).int()
    dynamic = {n: {0: "B"} for n in "xiy"} if buckets else {}
    inputs = {"x": torch.randn(6, 4), "i": i, "y": torch.randn(6, 3)}
    return ig.TrainStep(model, loss, optimizer, inputs, dynamic=dynamic, buckets={"B": [8]} if buckets else {})


def compiled(output: Path, *names: str, buckets: bool = False) -> dict[str, Comparison]:
    """Compile one step for all these reads; return the comparisons with eager PyTorch."""
    step = make_step(*names, buckets=buckets)
    artifact = ig.compile(step, output, entry_points=("train_step",), cache=False)
    return {c.key: c for c in artifact.reports["llvm-cpu"].comparisons}


def agrees(comparisons: Mapping[str, Comparison], name: str) -> bool:
    """Whether the layer of this read has eager's weights after a step."""
    found = comparisons[key_of("state", 1, f"linear.{name}.weight")]
    return found.error <= found.allowed


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    return compiled(tmp_path_factory.mktemp("reads") / "step", *READS)


@pytest.mark.parametrize("name", READS)
def test_indices_of_32_bits(name: str, comparisons: dict[str, Comparison]) -> None:
    assert agrees(comparisons, name)


def test_indices_of_32_bits_in_a_bucket(tmp_path: Path) -> None:
    names = "rows", "written rows"
    comparisons = compiled(tmp_path / "step", *names, buckets=True)
    assert all(agrees(comparisons, name) for name in names)


def test_torch_mlir_still_compares_integers_of_two_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, torch-mlir is fixed, and `in_int64` can go."""
    for module in (indexing, scatter):
        monkeypatch.setattr(module, "in_int64", list)
    with pytest.raises(InternalError, match=r"arith\.cmpi"):
        ig.compile(make_step("rows"), tmp_path / "step", entry_points=("train_step",), cache=False)
