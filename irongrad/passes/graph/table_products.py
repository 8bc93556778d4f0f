"""Rewrite products with rows of a table as products with the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, is_zeros, replace, value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.inline import inline

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten.clone.default)  # a copy is a view of the same shape

# The operations of a product that take as long as adding one element to a row. One core of a Zen 4 adds 2e9 elements a
# second in a scatter of IREE 3.13.0, and does 1e11 operations of a product a second.
_ADDITION = 50


@dataclass(frozen=True)
class TableProducts:
    """Multiply a table before its rows are gathered, and sum gradients by row before they are multiplied.

    Before:
        x = embedding(table, index)                             # [M, K] of [V, K]
        y = mm(x, w)                                            # [M, N]
        dw = mm(permute(dy), x)
        dtable = index_put(zeros, [index], mm(dy, permute(w)), True)
    After:
        y = embedding(mm(table, w), index)
        rows = index_put(zeros, [index], dy, True)              # [V, N]
        dw = mm(permute(rows), table)
        dtable = mm(rows, permute(w))

    Equal rows have equal products, and rows that are multiplied by the same matrix may be summed first. Each of the
    three products then takes V rows instead of M. In a model of characters or bytes, the first layer after the
    embedding then costs as much as its alphabet, not as a batch of text.

    Holds before: float32 or float64. Views and permutations between the rows and the product must keep rows whole; the
    pass applies them to the index. Left alone:

    * sums that cost more than they save
    * half precision, because the sums would be in half precision
    * the gradient of `w` if it has so many rows that it is already a sum of several products
    * rows that a bucket masks
    * targets other than a CPU, because the gain is not measured there

    Attributes:
        chain: the most rows that are summed one after the other. More rows are summed in parts, for float32's
            precision.
    """

    name: ClassVar[str] = "table-products"

    chain: int = 1024

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if set(context.targets) != {"llvm-cpu"}:
            return PassResult(False)
        products = 0
        for node in [n for n in graph.graph.nodes if _is_wide(n)]:
            if (new := self._replacement(node)) is not None:
                replace(node, new)
                products += 1
        return PassResult(products > 0, {"products": products})

    def _replacement(self, node: Node) -> Node | None:
        """The replacement of `node`, inserted before it; None if `node` stays."""
        if node.target is aten.index_put.default:
            if (put := self._if_worthwhile(_added_rows(node))) is None:
                return None
            left, right = _operands(put.table)
            return inline(torch.mm, [self._added_up(node, put, put.index_before(node), left), right], node)
        if node.target is not aten.mm.default:
            return None
        left, right = _operands(node)
        if (taken := self._if_worthwhile(_gathered_rows(left))) is not None:
            return _gather_rows(inline(torch.mm, [taken.table, right], node), taken.index_after(node), node)
        if (taken := self._if_worthwhile(_gathered_rows(right))) is not None:
            added = self._added_up(node, taken, taken.index_after(node), _transposed(left, node))
            return inline(_transposed_product, [added, taken.table], node)
        if _is_transpose(left) and (taken := self._if_worthwhile(_gathered_rows(left.all_input_nodes[0]))) is not None:
            added = self._added_up(node, taken, taken.index_after(node), right)
            return inline(_transposed_product, [taken.table, added], node)
        return None

    def _if_worthwhile(self, rows: _Rows | None) -> _Rows | None:
        """Return `rows` if summing them first, or gathering them later, saves more than it costs."""
        if rows is None:
            return None
        spared = 2 * rows.width * (rows.count - rows.height)
        return rows if spared > _ADDITION * rows.count and self._parts(rows) * rows.height <= rows.count else None

    def _parts(self, rows: _Rows) -> int:
        """The smallest number of equal parts of at most `chain` rows."""
        fewest = -(-rows.count // self.chain)
        return next(parts for parts in range(fewest, rows.count + 1) if rows.count % parts == 0)

    def _added_up(self, like: Node, rows: _Rows, index: Node, values: Node) -> Node:
        return inline(_AddUp(rows.height, self._parts(rows)), [index, values], like)


def _gather_rows(table: Node, index: Node, like: Node) -> Node:
    with like.graph.inserting_before(like):
        return call(like.graph, aten.embedding.default, table, index, like=like)


def _transposed(node: Node, like: Node) -> Node:
    return node.all_input_nodes[0] if _is_transpose(node) else inline(torch.t, [node], like)


@dataclass(frozen=True)
class _Rows:
    """Rows that are gathered from a matrix, or added to the rows of another.

    Attributes:
        table: the matrix that the rows are gathered from, or the product whose rows are added.
        index: the rows that are gathered, or that are added to; an index tensor of any shape.
        moves: the views and permutations between the rows and where they are read, in order.
        height: the number of different rows.
        width: the elements of a row that is gathered, or added to.
        count: the number of rows that are gathered or added.
    """

    table: Node
    index: Node
    moves: Sequence[Node]
    height: int
    width: int
    count: int

    def index_after(self, like: Node) -> Node:
        """Return the index in the order of the rows after `moves`."""
        index = self.index
        for move in self.moves:
            index = _moved_index(index, value_of(move).shape[:-1], _row_order(move), like)
        return _moved_index(index, [self.count], None, like)

    def index_before(self, like: Node) -> Node:
        """Return the index in the order of the rows before `moves`."""
        index = self.index
        for move in reversed(self.moves):
            (source,) = move.all_input_nodes
            order = _row_order(move)
            back = None if order is None else sorted(range(len(order)), key=order.__getitem__)
            index = _moved_index(index, value_of(move).shape[:-1], None, like)
            index = _moved_index(index, value_of(source).shape[:-1], back, like)
        return _moved_index(index, [self.count], None, like)


def _moved_index(index: Node, shape: Sequence[int], order: Sequence[int] | None, like: Node) -> Node:
    """`index` with its dimensions permuted by `order`, or viewed in `shape` if there is no order.

    `index` itself if it has that shape.
    """
    if order is None:
        while index.target in _VIEWS and list(value_of(index).shape) != list(shape):
            (index,) = index.all_input_nodes
        if list(value_of(index).shape) == list(shape):
            return index
    operator, how = (aten.view.default, shape) if order is None else (aten.permute.default, order)
    with like.graph.inserting_before(like):
        return call(like.graph, operator, index, list(how), like=like)


def _row_order(move: Node) -> list[int] | None:
    """The order in which a permutation puts the dimensions of rows; None for a view."""
    if move.target in _VIEWS:
        return None
    dims: Any = move.args[1]
    return [d % len(dims) for d in dims[:-1]]


def _gathered_rows(node: Node) -> _Rows | None:
    """The rows of a table that `node` gathers."""
    source, moves = _moves(node)
    if source.target is not aten.embedding.default:
        return None
    table, index, *_ = source.args
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    height, width = value_of(table).shape
    return _Rows(table, index, moves, height, width, value_of(index).numel())


def _added_rows(node: Node) -> _Rows | None:
    """The rows of a product that `node` adds to zeros."""
    zeros, indices, values, *accumulate = node.args
    if accumulate != [True] or len(indices) != 1 or not is_zeros(zeros) or value_of(node).ndim != 2:
        return None
    source, moves = _moves(values)
    if source.target is not aten.mm.default or not _is_wide(source) or value_of(indices[0]).ndim != 1:
        return None
    height, width = value_of(node).shape
    return _Rows(source, indices[0], moves, height, width, value_of(indices[0]).numel())


def _moves(node: Node) -> tuple[Node, list[Node]]:
    """The node whose rows `node` reorders or reshapes, and the views and permutations between, in order."""
    moves = list[Node]()
    while (node.target in _VIEWS or node.target is aten.permute.default) and _leaves_rows(node):
        moves.append(node)
        (node,) = node.all_input_nodes
    return node, moves[::-1]


def _leaves_rows(move: Node) -> bool:
    (source,) = move.all_input_nodes
    if move.target in _VIEWS:
        return list(value_of(move).shape[-1:]) == list(value_of(source).shape[-1:])
    dims: Any = move.args[1]
    return bool(dims[-1] in (-1, len(dims) - 1))


def _is_transpose(node: Node) -> bool:
    return node.target is aten.permute.default and node.args[1] == [1, 0]


def _is_wide(node: Node) -> bool:
    return isinstance(v := node.meta.get("val"), torch.Tensor) and v.dtype in (torch.float32, torch.float64)


def _operands(product: Node) -> tuple[Node, Node]:
    left, right = product.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    return left, right


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.t() @ b


@dataclass(frozen=True)
class _AddUp:
    """Sum rows by index: in equal parts, and then over the parts."""

    height: int
    parts: int

    def __call__(self, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.parts == 1:
            return values.new_zeros(self.height, values.shape[1]).index_put([index], values, True)
        first = torch.arange(self.parts, dtype=index.dtype) * self.height
        places = (index.view(self.parts, -1) + first.unsqueeze(1)).view(-1)
        zeros = values.new_zeros(self.parts * self.height, values.shape[1])
        return zeros.index_put([places], values, True).view(self.parts, self.height, -1).sum(0)


PASS = TableProducts
