"""The pass table-products: multiply a small table, instead of the many rows that are looked up in it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from irongrad.passes import parse_passes, run_passes
from irongrad.passes.graph.table_products import TableProducts

aten = torch.ops.aten


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def places(*shape: int, rows: int = 8) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(rows, shape)


def sizes(done, target) -> list[list[int]]:
    """The sizes of the results of an operator, after the pass."""
    return [list(n.meta["val"].shape) for n in done.after.graph.nodes if n.target is target]


def rows_of(table, index):
    return F.embedding(index, table)


def layer(table, index, weight, dy, move=torch.Tensor.contiguous):
    """A linear layer after an embedding, with `move` between them, and the gradients of both."""
    width = table.shape[1]
    x = move(rows_of(table, index)).reshape(-1, width)
    _, back = torch.func.vjp(lambda rows: move(rows).reshape(-1, width), rows_of(table, index))
    (dx,) = back(dy @ weight)
    dtable = aten.full.default(table.shape, 0.0).index_put([index.reshape(-1)], dx.reshape(-1, width), True)
    return x @ weight.mT, dy.mT @ x, dtable


def operands(*shape: int, width: int = 64) -> tuple[torch.Tensor, ...]:
    """The operands of `layer`, with a table of 8 rows."""
    index = places(*shape)
    return random(8, width), index, random(32, width), random(index.numel(), 32)


def test_a_layer_after_an_embedding_multiplies_the_table(apply):
    done = apply(TableProducts(), layer, *operands(16, 4))
    assert done.stats == {"products": 3}
    assert sorted(sizes(done, aten.mm.default)) == [[8, 32], [8, 64], [32, 64]]
    assert sizes(done, aten.embedding.default) == [[64, 32]]


def test_the_gradient_may_be_the_transposed_one(apply):
    def fn(table, index, weight, dy):
        x = rows_of(table, index)
        return x.mT @ dy, x.mT @ dy.sin()

    done = apply(TableProducts(), fn, *operands(64))
    assert done.stats == {"products": 2}
    assert sizes(done, aten.mm.default) == [[64, 32]] * 2


def test_the_matrix_before_the_rows_need_not_be_transposed(apply):
    done = apply(TableProducts(), lambda t, i, w, dy: dy.view(32, 64) @ rows_of(t, i), *operands(64))
    assert done.stats == {"products": 1}
    assert sizes(done, aten.index_put.default) == [[8, 32]]


def time_first(rows):
    """Time comes first in recurrent layers."""
    return rows.transpose(0, 1)


def test_both_gradients_read_the_same_sums_and_rows_are_moved_once(step_of):
    """The pass transposes the index instead of the rows."""
    step = step_of(partial(layer, move=time_first), *operands(16, 4))
    ((name, _),) = step.functions.items()
    nodes = run_passes(step, parse_passes("simplify,cse,table-products,cse,dce")).functions[name].graph.graph.nodes
    (put,) = [n for n in nodes if n.target is aten.index_put.default]
    assert list(put.meta["val"].shape) == [8, 32]
    assert len(put.users) == 2
    assert len([n for n in nodes if n.target is aten.permute.default and n.meta["val"].dtype is torch.int64]) == 1


@given(data=st.data())
def test_rows_in_any_order_and_shape(apply, data):
    """Views and permutations between a table and its product do not change the results."""
    shape = data.draw(st.sampled_from([(64,), (4, 16), (2, 8, 4), (2, 2, 4, 4)]))
    order = data.draw(st.permutations(range(len(shape))))
    again = data.draw(st.sampled_from([(64,), (16, 4), (8, 2, 4)]))
    swapped = data.draw(st.permutations(range(len(again))))

    def move(rows):
        moved = rows.permute(*order, len(shape)).reshape(*again, rows.shape[-1])
        return moved.permute(*swapped, len(again))

    assert apply(TableProducts(), partial(layer, move=move), *operands(*shape)).stats == {"products": 3}


def test_long_sums_are_made_of_parts(apply):
    done = apply(TableProducts(chain=20), layer, *operands(96))
    assert done.stats == {"products": 3}
    assert sizes(done, aten.index_put.default) == [[6 * 8, 32]] * 2  # 16 of 96 rows each


@pytest.mark.parametrize(
    ("given", "item", "target"),
    [
        (operands(8), TableProducts(), "llvm-cpu"),  # the table has as many rows as are looked up
        (operands(64, width=16), TableProducts(), "llvm-cpu"),  # the sum of short rows takes longer
        (operands(97), TableProducts(chain=20), "llvm-cpu"),  # 97 is prime, so each row would be its own part
        (tuple(o if o.dtype is torch.int64 else o.bfloat16() for o in operands(64)), TableProducts(), "llvm-cpu"),
        (operands(64), TableProducts(), "cuda"),
    ],
)
def test_a_product_that_would_not_be_faster_stays(apply, given, item, target):
    assert not apply(item, layer, *given, target=target).changed


@pytest.mark.parametrize(
    "fn",
    [
        lambda t, i, w, dy: rows_of(t, i).exp() @ w.mT,  # rows are changed before the product
        lambda t, i, w, dy: rows_of(t, i).view(2, 32, 64).permute(0, 2, 1).reshape(64, 64) @ w.mT,  # rows are cut
        lambda t, i, w, dy: rows_of(t, i).view(128, 32) @ w[:, :32],  # halves of rows
        lambda t, i, w, dy: t.index_put([i], dy @ w, True),  # not added to zeros
        lambda t, i, w, dy: aten.full.default([8, 64], 0.0).index_put([i], dy @ w),  # overwrites in place of adding
        lambda t, i, w, dy: aten.full.default([8, 64], 0.0).index_put([i], (dy @ w).mT, True),  # adds columns
    ],
)
def test_others_stay(apply, fn):
    assert not apply(TableProducts(), fn, *operands(64)).changed
