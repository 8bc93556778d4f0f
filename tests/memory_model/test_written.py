"""Transposes and slices that IREE writes to memory."""

from __future__ import annotations

import pytest
import torch

from irongrad.memory_model.liveness import usage
from irongrad.memory_model.written_views import VIEWS, is_written_out
from irongrad.operators.legalize.retrace import retrace


def _product_of_halves(x):
    columns = x.t()
    return columns[:8] * columns[8:]


CASES = {
    "a transpose that a product reads": (lambda x: x.t() @ x, 0),
    "a transpose that is cut": (_product_of_halves, 1),
    "a transpose of a dimension of one": (lambda x: x.unsqueeze(0).transpose(0, 1).flatten(1)[:8] * 2, 0),
    "a part of a concatenation that is transposed": (lambda x: torch.cat([x.t(), x @ x]), 1),
    "rows that a product reads": (lambda x: x[:8].t() @ x[8:16], 0),
    "columns that a product reads": (lambda x: x[:, :8] @ x[:8], 1),
    "every other row that a product reads": (lambda x: x[::2] @ x, 1),
    "columns that elementwise code reads": (lambda x: x[:, :8] * x[:, 8:16], 0),
    "all columns": (lambda x: x[:, :16] @ x, 0),
    "a result that is a transposed concatenation": (lambda x: torch.stack([x, x + 1]).permute(1, 2, 0), 1),
    "a result that is a transposed product": (lambda x: (x @ x).t(), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_only_some_views_are_written_to_memory(name):
    function, count = CASES[name]
    graph = retrace(lambda x: [function(x)], [torch.empty(16, 16)])
    assert sum(is_written_out(n) for n in graph.graph.nodes if n.target in VIEWS) == count


def test_a_written_view_takes_memory_until_its_last_reader():
    def function(x):
        rows = x.t()
        return [(rows[:8] * rows[8:]) @ torch.ones(16, 16), (rows[:8] + rows[8:]) @ torch.ones(16, 16)]

    graph = retrace(function, [torch.empty(16, 16)])
    (transpose,) = [n for n in graph.graph.nodes if n.target in VIEWS and is_written_out(n)]
    (item,) = [i for i in usage(graph.graph).lifetimes if i.node is transpose]
    assert item.bytes == 16 * 16 * 4
    assert item.end > item.start


def test_an_operand_of_elementwise_code_in_a_products_kernel_is_packed():
    def function(x, residual):
        return [(x @ x + residual) @ x]

    graph = retrace(function, [torch.empty(16, 16), torch.empty(16, 16)])
    arguments = graph.graph.find_nodes(op="placeholder")
    packed = [item.node for item in usage(graph.graph).lifetimes]
    assert arguments[1] in packed


@pytest.mark.parametrize(("rows", "columns", "left", "right"), [(32, 32, 32, 32), (1, 4, 1, 16), (20, 3, 32, 4)])
def test_operands_are_rounded_up_to_whole_tiles_except_in_a_short_dimension(
    rows: int, columns: int, left: int, right: int
) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(64, columns)
    graph = retrace(lambda x, w: [torch.exp(x @ w).sum()], [x, weight])
    assert [item.bytes for item in usage(graph.graph).lifetimes][:2] == [left * 64 * 4, right * 64 * 4]


def test_a_value_that_only_one_product_reads_is_stored_packed_only() -> None:
    def copies(products: int) -> int:
        def function(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
            value = torch.exp(x)
            return [(value @ weight).sum() for weight in weights]

        graph = retrace(function, [torch.randn(32, 32)] * (1 + products))
        return sum(item.node.name == "exp" for item in usage(graph.graph).lifetimes)

    assert copies(1) == 1
    assert copies(2) == 2  # unpacked, and packed for both products
