"""Rewrites written as functions of tensors: the function is traced, and its nodes replace one node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.nodes import meta_of, value_of
from irongrad.passes.record_function import record
from irongrad.passes.rules import RULES, apply_rules


def inline(function: Callable[..., torch.Tensor], operands: Sequence[Node], like: Node) -> Node:
    """Trace `function` on values like those of `operands`, and insert its nodes before `like`.

    Args:
        function: takes one tensor for each operand, and consists of operators that the decomposition table knows. Equal
            functions must have equal graphs: they are traced once for operands of the same shapes.
        operands: nodes before `like`.
        like: the node whose source line the new nodes inherit.

    Returns:
        The node of the result.
    """
    graph = _traced(function, tuple((tuple(v.shape), v.dtype) for v in map(value_of, operands)))
    new: dict[Node, Node] = {}
    meta = meta_of(like)
    arguments = iter(operands)
    with like.graph.inserting_before(like):
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                new[node] = next(arguments)
            elif node.op == "call_function":
                new[node] = like.graph.node_copy(node, new.__getitem__)
                new[node].meta = meta | {"val": node.meta["val"]}
    (result,) = next(n for n in reversed(graph.graph.nodes) if n.op == "output").args[0]
    return new[result]


@functools.lru_cache(maxsize=256)
def _traced(
    function: Callable[..., torch.Tensor], operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
) -> GraphModule:
    graph = record(function, operands)
    apply_rules(graph, RULES)
    merge_common_subexpressions(graph)
    return graph
