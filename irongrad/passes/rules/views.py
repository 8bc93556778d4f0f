"""Rules for operators that only move elements.

Tensors in a graph have no strides. So a view equals a copy, and every operator that keeps the order of the elements is
a `view`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.passes.rules.patterns import Expression, Rule, family

aten, prims = torch.ops.aten, torch.ops.prims

view = family(aten.view.default)
# Operators that keep the elements and their order.
reshape = family(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    prims.squeeze.default,
)
permute = family(aten.permute.default)
expand = family(aten.expand.default)
slice_ = family(aten.slice.Tensor)
select = family(aten.select.int)
stack = family(aten.stack.default)
bmm = family(aten.bmm.default)
mm = family(aten.mm.default)
pad = family(aten.constant_pad_nd.default)
sum_ = family(aten.sum.dim_IntList)
embedding = family(aten.embedding.default)
put = family(aten.index_put.default)


def shape_of(x: Node) -> list[int]:
    """Return the sizes of a value."""
    return list(value_of(x).shape)


def positions(dims: Sequence[int], x: Node) -> list[int]:
    """Return dimensions of `x`, counted from the front."""
    return [d % value_of(x).ndim for d in dims]


def same_elements(x: Node, out: Node) -> Expression | Node:
    """Build a tensor of the elements of `x`, in their order, in the shape of `out`."""
    return x if shape_of(x) == shape_of(out) else view(x, shape_of(out))


def moves_nothing(x: Node, p: Sequence[int]) -> bool:
    """Whether a permutation keeps the order of all dimensions whose size is not 1."""
    moved = [d for d in positions(p, x) if shape_of(x)[d] != 1]
    return moved == sorted(moved)


def composed(x: Node, p: Sequence[int], q: Sequence[int]) -> Expression:
    """Build `x` permuted by `p`, then by `q`."""
    first = positions(p, x)
    return permute(x, [first[d] for d in positions(q, x)])


def used_once(node: Any) -> bool:
    """Whether the replaced node is the only user of a value."""
    return len(node.users) == 1


def product_of_one(x: Node, y: Node, out: Node) -> Expression:
    """Build the product of a batch that has only one pair of matrices."""
    return view(mm(view(x, shape_of(x)[1:]), view(y, shape_of(y)[1:])), shape_of(out))


def without_ones(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that are not 1."""
    return [s for s in sizes if s != 1]


def only_adds_ones(x: Node, y: Node) -> bool:
    """Whether `y`, a view of `x`, only adds dimensions of size 1."""
    return value_of(x).ndim < value_of(y).ndim and without_ones(shape_of(x)) == without_ones(shape_of(y))


def permuted_without_ones(x: Node, out: Node, p: Sequence[int]) -> Expression:
    """Build a permutation of a tensor with added dimensions of size 1 as a permutation of `x` before they are added."""
    (added,) = out.all_input_nodes
    rank = {d: i for i, d in enumerate(d for d, s in enumerate(shape_of(added)) if s != 1)}
    order = [rank[d] for d in positions(p, added) if d in rank]
    return view(permute(view(x, without_ones(shape_of(x))), order), shape_of(out))


def as_slice(w: Node, i: Node) -> Expression:
    """Build the rows of `w` with the indices 0, 1, ... as a slice."""
    return slice_(w, 0, 0, value_of(i).numel(), 1)


def counts_up(i: Node) -> bool:
    """Whether a value is 0, 1, 2, ..."""
    return i.target is aten.arange.start_step and i.args == (0, value_of(i).numel())


RULES = (
    Rule("view to the same", lambda x: reshape(x, ...), lambda x: x),
    Rule("view of a view", lambda x: reshape(reshape(x, ...), ...), same_elements, sized=True),
    Rule("view of a kept sum", lambda x, d: reshape(sum_(x, d, True), ...), lambda x, d: sum_(x, d, False),
         lambda out: used_once(out.args[0])),
    Rule("permute that moves nothing", lambda x, p: permute(x, p), same_elements, moves_nothing, sized=True),
    Rule("permute of a permute", lambda x, p, q: permute(permute(x, p), q), composed),
    Rule("permute of added ones", lambda x, p: permute(reshape(x, ...), p), permuted_without_ones,
         lambda x, out: only_adds_ones(x, out.all_input_nodes[0]), sized=True),
    Rule("expand to the same", lambda x: expand(x, ...), lambda x: x),
    Rule("whole slice", lambda x: slice_(x, ...), lambda x: x),
    Rule("select from one", lambda x: select(x, ...), same_elements,
         lambda x, out: value_of(x).numel() == value_of(out).numel(), sized=True),
    Rule("stack of one", lambda x: stack([x], ...), same_elements, sized=True),
    Rule("pad by nothing", lambda x, p: pad(x, p, ...), lambda x: x, lambda p: not any(p)),
    Rule("rows in order", lambda w, i: embedding(w, i, ...), as_slice, counts_up, sized=True),
    Rule("write rows in order", lambda i, x: put(0, [i], x, True), lambda x: x, counts_up, exact=False, sized=True),
    Rule("batch of one product", lambda x, y: bmm(x, y), product_of_one, lambda x: shape_of(x)[0] == 1,
         exact=False, sized=True),
)  # fmt: skip
