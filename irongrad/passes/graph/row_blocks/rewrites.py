"""Write a softmax between products in the form of FlashAttention, which takes fewer passes over its matrices.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.nodes import call, value_of
from irongrad.passes.graph.row_blocks.labels import RESHAPES
from irongrad.passes.graph.row_blocks.region import Region
from irongrad.passes.inline import inline

aten = torch.ops.aten

_SWAP = [0, 2, 1]


def rewrite(regions: Sequence[Region]) -> None:
    """Rewrite what the regions compute, in place."""
    for region in regions:
        for node in region.axes:
            _sum_shorter_rows(region, node)
    for region in regions:
        for node in region.axes:
            _divide_later(region, node)
            _transpose_later(region, node)


def _sum_shorter_rows(region: Region, node: Node) -> None:
    """The row sums of P * (dO V^T) are those of dO * O, because O = P V.

    Before:
        sum(mul(bmm(do, permute(v)), p), columns)
    After:
        sum(mul(do, bmm(p, v)), features)
    """
    if node.target is not aten.mul.Tensor or not region.axes[node].both:
        return
    for factor, weights in (node.args, node.args[::-1]):
        product = _unviewed(factor)
        output = _output(product, _unviewed(weights))
        total = _row_sum(region, node)
        if (
            output is None
            or total is None
            or value_of(total).numel() * value_of(weights).shape[-1] != value_of(node).numel()
        ):
            continue
        gradient = product.args[0]
        shape = tuple(value_of(total).shape)
        new = inline(_SumOfProducts(shape), [gradient, output], total)
        total.replace_all_uses_with(new)
        return


def _output(product: Any, weights: Any) -> Node | None:
    """The product of `weights` with the matrix whose transpose `product` multiplies."""
    if not isinstance(product, Node) or product.target is not aten.bmm.default:
        return None
    transpose = product.args[1]
    if transpose.target is not aten.permute.default or list(transpose.args[1]) != _SWAP:
        return None
    values = transpose.args[0]
    for user in values.users:
        if user.target is aten.bmm.default and user.args[1] is values and _unviewed(user.args[0]) is weights:
            return user
    return None


def _row_sum(region: Region, node: Node) -> Node | None:
    """The sums of the rows of a matrix."""
    for user in node.users:
        while user in region.axes and region.axes[user].both and user.target in (*RESHAPES, aten.sum.dim_IntList):
            if len(user.users) != 1:
                break
            (user,) = user.users
        if user.target is aten.sum.dim_IntList and user in region.axes and region.axes[user].col is None:
            return user
    return None


class _SumOfProducts:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SumOfProducts) and self._shape == other._shape

    def __hash__(self) -> int:
        return hash(self._shape)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(-1).view(self._shape)


def _divide_later(region: Region, node: Node) -> None:
    """Divide the rows of a product, which are shorter, in place of those of its operand.

    Before:
        bmm(div(p, rows), v)
    After:
        div(bmm(p, v), rows)
    """
    if node.target is not aten.bmm.default or region.axes[node].row is None or region.axes[node].both:
        return
    left, right = node.args
    quotient = _unviewed(left)
    if quotient.target is not aten.div.Tensor or quotient not in region.axes or not isinstance(quotient.args[1], Node):
        return
    dividend, divisor = quotient.args
    batch, rows, columns = value_of(left).shape
    if value_of(divisor).shape[-1:] != (1,) or value_of(divisor).numel() != batch * rows:
        return
    with node.graph.inserting_before(node):
        whole = call(node.graph, aten.view.default, dividend, [batch, rows, columns], like=node)
        totals = call(node.graph, aten.view.default, divisor, [batch, rows, 1], like=node)
        product = call(node.graph, aten.bmm.default, whole, right, like=node)
        node.replace_all_uses_with(call(node.graph, aten.div.Tensor, product, totals, like=node))


def _transpose_later(region: Region, node: Node) -> None:
    """Transpose a product in place of a matrix.

    Before:
        bmm(permute(p), do)
    After:
        permute(bmm(permute(do), p))
    """
    if node.target is not aten.bmm.default or region.axes[node].row is not None:
        return
    left, right = node.args
    if left.target is not aten.permute.default or left not in region.axes or list(left.args[1]) != _SWAP:
        return
    with node.graph.inserting_before(node):
        other = call(node.graph, aten.permute.default, right, _SWAP, like=node)
        product = call(node.graph, aten.bmm.default, other, left.args[0], like=node)
        node.replace_all_uses_with(call(node.graph, aten.permute.default, product, _SWAP, like=node))


def _unviewed(node: Any) -> Any:
    while isinstance(node, Node) and node.target in (*RESHAPES, aten.clone.default):
        node = node.args[0]
    return node
