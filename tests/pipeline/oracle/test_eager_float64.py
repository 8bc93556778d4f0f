"""What the float64 oracle runs where an eager kernel refuses float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grouped_mm

from irongrad.pipeline.oracle.eager_float64 import eager_float64

OFFSETS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("left", "right", "divided"),
    [((8, 4), (4, 4, 8), True), ((4, 8), (8, 4), True), ((4, 4, 8), (8, 8), True), ((4, 4, 8), (4, 8, 4), False)],
)
def test_grouped_products(left: tuple[int, ...], right: tuple[int, ...], divided: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(s, generator=generator, requires_grad=True) for s in (left, right))
    offsets = OFFSETS if divided else None
    with pytest.raises(RuntimeError):
        grouped_mm(x.double(), y.double(), offs=offsets)
    with eager_float64():
        wide = grouped_mm(x.double(), y.double(), offs=offsets)
    narrow = grouped_mm(x, y, offs=offsets)
    torch.testing.assert_close(wide.float(), narrow)
    weights = torch.randn(narrow.shape, generator=generator)
    found = torch.autograd.grad((wide * weights).sum(), (x, y))
    torch.testing.assert_close(found, torch.autograd.grad((narrow * weights).sum(), (x, y)))
