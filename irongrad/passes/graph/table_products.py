"""Products with rows of a table, as products with the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, replace, value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.inline import inline

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten.clone.default)  # a copy is one of the same shape

# As many operations of a product take as long as adding one number to its row: one core of a Zen 4 adds 2e9 numbers a
# second in a scatter of IREE 3.13.0, and does 1e11 operations of a product.
_ADDITION = 50


@dataclass(frozen=True)
class TableProducts:
    """Multiply a table before its rows are taken, and add gradients up by row before they are multiplied.

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

    Equal rows have equal products, and what is multiplied by the same matrix may be added up before. Each of the three
    then takes V rows in place of M: in a model of characters or bytes, the first layer behind the embedding costs what
    its alphabet does, and not what a batch of text does.

    Holds before: float32 or float64. Views and permutations on the way leave rows whole; they are done to the index.
    Left alone: where adding up costs more than it spares; half precision, which would be added up as such; the gradient
    of `w` over so many rows that it is a sum of products already; rows that a bucket masks; and everything for other
    targets than a CPU, where it is not measured.

    Attributes:
        chain: how many rows may be added up one after the other; more are added up in parts, for float32's sake.
    """

    name: ClassVar[str] = "table-products"

    chain: int = 1024

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if set(context.targets) != {"llvm-cpu"}:
            return PassResult(False)
        products = 0
        for node in [n for n in graph.graph.nodes if _is_wide(n)]:
            if (new := self._rewritten(node)) is not None:
                replace(node, new)
                products += 1
        return PassResult(products > 0, {"products": products})

    def _rewritten(self, node: Node) -> Node | None:
        """What `node` is to be, before it; nothing where it stays."""
        if node.target is aten.index_put.default:
            if (put := self._worth(_put(node))) is None:
                return None
            left, right = _operands(put.table)
            return inline(torch.mm, [self._added_up(node, put, put.index_before(node), left), right], node)
        if node.target is not aten.mm.default:
            return None
        left, right = _operands(node)
        if (taken := self._worth(_taken(left))) is not None:
            return _take(inline(torch.mm, [taken.table, right], node), taken.index_after(node), node)
        if (taken := self._worth(_taken(right))) is not None:
            added = self._added_up(node, taken, taken.index_after(node), _transposed(left, node))
            return inline(_transposed_product, [added, taken.table], node)
        if _is_transpose(left) and (taken := self._worth(_taken(left.all_input_nodes[0]))) is not None:
            added = self._added_up(node, taken, taken.index_after(node), right)
            return inline(_transposed_product, [taken.table, added], node)
        return None

    def _worth(self, rows: _Rows | None) -> _Rows | None:
        """`rows` where adding them up, or taking them later, spares more than it costs."""
        if rows is None:
            return None
        spared = 2 * rows.width * (rows.count - rows.height)
        return rows if spared > _ADDITION * rows.count and self._parts(rows) * rows.height <= rows.count else None

    def _parts(self, rows: _Rows) -> int:
        """The fewest equal parts of rows."""
        fewest = -(-rows.count // self.chain)
        return next(parts for parts in range(fewest, rows.count + 1) if rows.count % parts == 0)

    def _added_up(self, like: Node, rows: _Rows, index: Node, values: Node) -> Node:
        return inline(_AddUp(rows.height, self._parts(rows)), [index, values], like)


def _take(table: Node, index: Node, like: Node) -> Node:
    with like.graph.inserting_before(like):
        return call(like.graph, aten.embedding.default, table, index, like=like)


def _transposed(node: Node, like: Node) -> Node:
    return node.all_input_nodes[0] if _is_transpose(node) else inline(torch.t, [node], like)


@dataclass(frozen=True)
class _Rows:
    """Rows of one matrix that are taken, or added to those of another.

    Attributes:
        table: the matrix that they are taken from, or the product whose rows are added.
        index: which are taken, or what they are added to, of any shape.
        moves: views and permutations on the way from the rows to where they are read, in order.
        height: how many different rows there may be.
        width: elements of a row of what is taken, or added to.
        count: how many rows are taken or added.
    """

    table: Node
    index: Node
    moves: Sequence[Node]
    height: int
    width: int
    count: int

    def index_after(self, like: Node) -> Node:
        """The index, as `moves` order what is taken."""
        index = self.index
        for move in self.moves:
            index = _moved(index, value_of(move).shape[:-1], _order(move), like)
        return _moved(index, [self.count], None, like)

    def index_before(self, like: Node) -> Node:
        """The index, in the order of what `moves` begin with."""
        index = self.index
        for move in reversed(self.moves):
            (source,) = move.all_input_nodes
            order = _order(move)
            back = None if order is None else sorted(range(len(order)), key=order.__getitem__)
            index = _moved(index, value_of(move).shape[:-1], None, like)
            index = _moved(index, value_of(source).shape[:-1], back, like)
        return _moved(index, [self.count], None, like)


def _moved(index: Node, shape: Sequence[int], order: Sequence[int] | None, like: Node) -> Node:
    """`index` with its dimensions in `order`, or where there is none, in another shape; itself where that is so."""
    if order is None:
        while index.target in _VIEWS and list(value_of(index).shape) != list(shape):
            (index,) = index.all_input_nodes
        if list(value_of(index).shape) == list(shape):
            return index
    operator, how = (aten.view.default, shape) if order is None else (aten.permute.default, order)
    with like.graph.inserting_before(like):
        return call(like.graph, operator, index, list(how), like=like)


def _order(move: Node) -> list[int] | None:
    """The order of the rows' dimensions that a permutation gives; none for a view."""
    if move.target in _VIEWS:
        return None
    dims: Any = move.args[1]
    return [d % len(dims) for d in dims[:-1]]


def _taken(node: Node) -> _Rows | None:
    """The rows of a table that `node` is."""
    source, moves = _moves(node)
    if source.target is not aten.embedding.default:
        return None
    table, index, *_ = source.args
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    height, width = value_of(table).shape
    return _Rows(table, index, moves, height, width, value_of(index).numel())


def _put(node: Node) -> _Rows | None:
    """The rows of a product that `node` adds to zeros."""
    zeros, indices, values, *accumulate = node.args
    if accumulate != [True] or len(indices) != 1 or not _is_zero(zeros) or value_of(node).ndim != 2:
        return None
    source, moves = _moves(values)
    if source.target is not aten.mm.default or not _is_wide(source) or value_of(indices[0]).ndim != 1:
        return None
    height, width = value_of(node).shape
    return _Rows(source, indices[0], moves, height, width, value_of(indices[0]).numel())


def _moves(node: Node) -> tuple[Node, list[Node]]:
    """What `node` is the rows of, in another order or shape, and what gives them that, in order."""
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


def _is_zero(node: Node) -> bool:
    return node.target is aten.full.default and bool(node.args[1] == 0)


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
    """Rows added up by index, in equal parts that are added up in the end."""

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
