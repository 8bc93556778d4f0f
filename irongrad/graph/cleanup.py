"""Two rewrites that every stage may use: drop dead nodes, and merge equal ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx import GraphModule, Node

from irongrad.graph.nodes import replace
from irongrad.graph.purity import is_mergeable, is_pure


def eliminate_dead_code(graph: GraphModule) -> int:
    """Drop pure nodes without users, from the last to the first, and the bodies that only they named.

    Returns:
        How many nodes were dropped.
    """
    removed = 0
    for node in reversed(graph.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and is_pure(node):
            graph.graph.erase_node(node)
            removed += 1
    named = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [n for n, _ in graph.named_children() if n not in named]:
        graph.delete_submodule(name)
    return removed


def merge_common_subexpressions(graph: GraphModule) -> int:
    """Replace every node by the first that computes the same.

    Returns:
        How many nodes were merged into another one.
    """
    first: dict[Hashable, Node] = {}
    merged = 0
    for node in list(graph.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not is_mergeable(node):
            continue
        known = first.setdefault((node.op, node.target, _key(node.args), _key(node.kwargs)), node)
        if known is not node:
            replace(node, known)
            merged += 1
    return merged


def _key(value: Any) -> Hashable:
    """Equal for equal arguments. Python takes 1, 1.0 and True for equal, and 0.0 and -0.0; an operator may not."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return value if isinstance(value, Node) else (type(value), repr(value))
