"""A rule for the sum of each row of a matrix product, times another matrix: the gradient of attention has it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.passes.rules.arithmetic import mul
from irongrad.passes.rules.patterns import Expression, Rule
from irongrad.passes.rules.views import bmm, permute, positions, reshape, shape_of, sum_, view


def _without_views(node: Node) -> Node:
    """The tensor whose elements a node has in another shape."""
    while node.target in reshape.operators:
        node = node.args[0]
    return node


def _is_transpose(x: Node, y: Node) -> bool:
    """Whether two batches of matrices, of which `y` has rank 3, are permuted and viewed so that one has transposes."""
    permuted = _without_views(x)
    if permuted.target not in permute.operators:
        return False
    source, order = permuted.args
    assert isinstance(source, Node)
    rank = value_of(source).ndim
    swaps = positions(order, source) == [*range(rank - 2), rank - 1, rank - 2]
    return swaps and shape_of(source)[-2:] == shape_of(y)[-2:] and _without_views(source) is _without_views(y)


def _products_of(matrices: Node) -> Iterator[Node]:
    """Yield the products whose left operand has the elements of `matrices`, in any shape."""
    for user in matrices.users:
        if user.target in reshape.operators:
            yield from _products_of(user)
        elif user.target in bmm.operators and user.args[0] is matrices:
            yield user


def _has_rows_of(x: Node, matrices: Node) -> bool:
    """Whether `x` has the rows of a batch of matrices; its batch may have more dimensions."""
    return shape_of(x)[-2:] == shape_of(matrices)[-2:] and value_of(x).numel() == value_of(matrices).numel()


def _shorter_rows(x: Node, y: Node, out: Node) -> tuple[Node, Node] | None:
    """Two batches of matrices whose product, element by element, has the sums of the rows of `x` times `y`.

    They are `a` and `y @ c`, if `x` is `a @ c.T`, and `y @ c` is computed before `out`. None unless their rows are
    shorter than those of `x`. Halves are left alone, as `y @ c` is rounded to them.
    """
    product = _without_views(x)
    if product.target not in bmm.operators or shape_of(x) != shape_of(y) or not _has_rows_of(x, product):
        return None
    a, b = product.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    is_half = value_of(x).dtype not in (torch.float32, torch.float64)
    if is_half or shape_of(a)[-1] >= shape_of(x)[-1]:
        return None
    for found in _products_of(_without_views(y)):
        left, c = found.args
        if (
            (_is_transpose(b, c) or _is_transpose(c, b))
            and _has_rows_of(y, left)
            and shape_of(found) == shape_of(a)
            and found < out
        ):
            return a, found
    return None


def _either(x: Node, y: Node, out: Node) -> tuple[Node, Node] | None:
    are_tensors = isinstance(x, Node) and isinstance(y, Node)
    return (_shorter_rows(x, y, out) or _shorter_rows(y, x, out)) if are_tensors else None


def _sums(x: Node, y: Node, out: Node) -> Expression:
    found = _either(x, y, out)
    assert found is not None
    return view(sum_(mul(*found), [-1], False), shape_of(out))


def _is_of_rows(x: Node, y: Node, d: list[int], out: Node) -> bool:
    return d in ([-1], [value_of(out.args[0]).ndim - 1]) and _either(x, y, out) is not None


RULES = (
    # FlashAttention-2 (Dao, arXiv:2307.08691, section 2.3.2) computes the sum in the gradient of a softmax so. Of
    # infinite numbers, one side may be infinite where the other is nan.
    Rule("sum of (a @ c.T) * p by p @ c", lambda x, y, d: sum_(mul(x, y), d, ...), _sums, _is_of_rows,
         exact=False, sized=True),
)  # fmt: skip
