"""Sums of products of matrices, and of sums, that are one product and one sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.passes.base import Context, PassResult, value_of
from irongrad.passes.dead_code import eliminate_dead_code
from irongrad.passes.rewrite import call, concatenated, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class ProductSums:
    """Make a sum of products of matrices one product, and a sum of sums over the first dimension one sum.

    Before:
        y = mm(a, b) + mm(c, d); z = sum(e, [0]) + sum(f, [0])
    After:
        y = mm(cat([a, c], 1), cat([b, d], 0)); z = sum(cat([e, f], 0), [0])

    The gradient of a weight that is used at every step of a sequence is such a sum: one long product keeps the result
    in registers, where many short ones write it and add it up (as J. Appleyard et al., "Optimizing Performance of
    Recurrent Neural Networks on GPUs", 2016, do by hand).

    Left alone: sums of fewer than `least` terms, and products so long that to copy their operands costs more than to
    add their results.

    Attributes:
        least: how many terms make it worth while.
    """

    name: ClassVar[str] = "product-sums"

    least: int = 3

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        stats = {"products": 0, "sums": 0}
        for node in [n for n in graph.graph.nodes if _is_addition(n) and not _is_inner(n)]:
            terms = [_without_views(t) for t in _terms(node)]
            if len(terms) < self.least:
                continue
            if all(_is_short_product(t) for t in terms):
                _join(node, terms, aten.mm.default)
                stats["products"] += len(terms)
            elif all(_is_sum(t) for t in terms) and len({_row(t) for t in terms}) == 1:
                _join(node, terms, aten.sum.dim_IntList)
                stats["sums"] += len(terms)
        if any(stats.values()):
            eliminate_dead_code(graph)
        return PassResult(any(stats.values()), stats)


def _is_addition(node: Node) -> bool:
    """Whether `node` is a sum of two tensors of its own shape."""
    if node.target is not aten.add.Tensor or node.kwargs or not node.users:
        return False
    shapes = [value_of(a).shape for a in node.args if isinstance(a, Node)]
    return shapes == [value_of(node).shape] * 2


def _is_inner(node: Node) -> bool:
    """Whether another sum takes `node` in."""
    return len(node.users) == 1 and _is_addition(next(iter(node.users)))


def _terms(node: Node) -> Iterator[Node]:
    for operand in node.all_input_nodes if len(node.all_input_nodes) == 2 else ():
        if _is_addition(operand) and len(operand.users) == 1:
            yield from _terms(operand)
        else:
            yield operand


def _without_views(node: Node) -> Node:
    while node.target in (aten.view.default, aten.alias.default) and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node


def _is_short_product(node: Node) -> bool:
    if node.target is not aten.mm.default or len(node.users) != 1:
        return False
    rows, columns = value_of(node).shape
    length = value_of(node.all_input_nodes[0]).shape[1]
    return bool(2 * length * (rows + columns) <= rows * columns)


def _is_sum(node: Node) -> bool:
    """Whether `node` is a sum over the first dimension of a matrix."""
    if node.target is not aten.sum.dim_IntList or len(node.users) != 1 or node.kwargs:
        return False
    return bool(value_of(node.all_input_nodes[0]).ndim == 2 and node.args[1] == [0])


def _row(node: Node) -> tuple[int, torch.dtype]:
    value = value_of(node.all_input_nodes[0])
    return value.shape[1], value.dtype


def _join(node: Node, terms: list[Node], operator: torch._ops.OpOverload) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        if operator is aten.mm.default:
            left, right = (concatenated([t.args[side] for t in terms], 1 - side, node) for side in (0, 1))
            result = call(graph, operator, left, right, like=node)
        else:
            result = call(graph, operator, concatenated([t.args[0] for t in terms], 0, node), [0], like=node)
        if value_of(result).shape != value_of(node).shape:
            result = call(graph, aten.view.default, result, list(value_of(node).shape), like=node)
    replace(node, result)


PASS = ProductSums
