"""Grouped matrix products, for all kinds of group sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.decompositions.grouped_products import by_groups, by_rows
from irongrad.operators.legalize.core_operators import CORE
from irongrad.operators.legalize.retrace import retrace

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def slices(counts: list[int]) -> list[slice]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


@given(counts=COUNTS, outside=st.integers(0, 3))
def test_grouped_products_equal_one_product_per_group(counts: list[int], outside: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = sum(counts) + outside
    x, y = (torch.randn(rows, n, dtype=torch.float64, generator=generator) for n in (3, 2))
    weights = torch.randn(len(counts), 3, 2, dtype=torch.float64, generator=generator)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    parts = [x[s] @ w for s, w in zip(slices(counts), weights, strict=True)]
    torch.testing.assert_close(by_rows(x, weights, offsets), torch.cat([*parts, torch.zeros(outside, 2).double()]))
    expected = torch.stack([x[s].T @ y[s] for s in slices(counts)])
    torch.testing.assert_close(by_groups(x, y, offsets), expected)


def test_no_group_reads_rows_of_another() -> None:
    x = torch.tensor([[1.0], [torch.inf], [torch.nan], [2.0]])
    found = by_rows(x, torch.tensor([[[3.0]], [[0.0]], [[5.0]]]), torch.tensor([1, 3, 4]))
    torch.testing.assert_close(found, torch.tensor([[3.0], [torch.nan], [torch.nan], [10.0]]), equal_nan=True)


@pytest.mark.parametrize(("left", "right"), [((6, 4), (3, 4, 8)), ((4, 6), (6, 8)), ((3, 8, 4), (4, 6))])
def test_every_form_of_grouped_mm_matches_pytorch(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """PyTorch's kernel requires strides that are multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*s[:-1], 8, generator=generator)[..., : s[-1]] for s in (left, right))
    offsets = torch.tensor([1, 1, 6], dtype=torch.int32)
    found = decomposition_table()[torch.ops.aten._grouped_mm.default](x, y, offsets)
    torch.testing.assert_close(found, torch.nn.functional.grouped_mm(x, y, offs=offsets))


def test_grouped_products_decompose_into_core_operators() -> None:
    graph = retrace(
        lambda x, w, offsets: [torch.ops.aten._grouped_mm.default(x, w, offsets)],
        [torch.empty(6, 4), torch.empty(3, 4, 8), torch.empty(3, dtype=torch.int32)],
    )
    assert {str(n.target) for n in graph.graph.nodes if n.op == "call_function"} <= CORE
