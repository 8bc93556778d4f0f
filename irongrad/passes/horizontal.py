"""Products of matrices that share an operand, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.passes.base import Context, PassResult, value_of
from irongrad.passes.dead_code import eliminate_dead_code
from irongrad.passes.rewrite import call, concatenated, replace, sort_topologically

aten = torch.ops.aten


@dataclass(frozen=True)
class Horizontal:
    """Make products of matrices that share an operand one product.

    Before:
        q = mm(x, a); k = mm(x, b)                                # a [C, M], b [C, N]
    After:
        qk = mm(x, cat([a, b], 1)); q = qk[:, :M]; k = qk[:, M:]

    The projections of attention, of a gated MLP, and the gradients of their weights are such products: the shared
    operand is packed and read once.

    Left alone: products of which one depends on another.
    """

    name: ClassVar[str] = "horizontal"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        merged = 0
        for shared in (0, 1):
            for group in list(_groups(graph, shared)):
                _merge(group, shared)
                merged += len(group)
        if merged:
            sort_topologically(graph.graph)
            eliminate_dead_code(graph)
        return PassResult(merged > 0, {"merged": merged})


def _groups(graph: GraphModule, shared: int) -> Iterator[list[Node]]:
    by_operand: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is aten.mm.default:
            by_operand[node.args[shared]].append(node)
    for group in by_operand.values():
        independent = _independent(group)
        if len(independent) > 1:
            yield independent


def _independent(group: Sequence[Node]) -> list[Node]:
    """Those of `group`, in order, that depend on none of the others."""
    chosen: list[Node] = []
    for node in group:
        if not _depends(node, set(chosen)):
            chosen.append(node)
    return chosen


def _depends(node: Node, others: set[Node]) -> bool:
    seen: set[Node] = set()
    left = list(node.all_input_nodes)
    while left:
        current = left.pop()
        if current in others:
            return True
        if current not in seen:
            seen.add(current)
            left += current.all_input_nodes
    return False


def _merge(group: Sequence[Node], shared: int) -> None:
    first, last = group[0], group[-1]
    dim = 1 - shared
    graph = last.graph
    sizes = [value_of(n).shape[dim] for n in group]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    with graph.inserting_before(last):
        joined = concatenated([n.args[1 - shared] for n in group], dim, first)
        operands = (first.args[0], joined) if shared == 0 else (joined, first.args[1])
        whole = call(graph, aten.mm.default, *operands, like=first)
        parts = [
            call(graph, aten.slice.Tensor, whole, dim, *limits, like=node)
            for limits, node in zip(pairwise([0, *ends]), group, strict=True)
        ]
    for node, part in zip(group, parts, strict=True):
        replace(node, part)


PASS = Horizontal
