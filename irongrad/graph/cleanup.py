"""Two rewrites that every stage may use: drop dead nodes, and merge equal nodes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx import GraphModule, Node

from irongrad.graph.nodes import replace
from irongrad.graph.purity import is_mergeable, is_pure


def eliminate_dead_code(graph: GraphModule) -> int:
    """Drop pure nodes without users, from the last to the first, and bodies of control flow that no node names.

    Returns:
        The number of nodes that were dropped.
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
    """Replace every node by the first node that computes the same value.

    Returns:
        The number of nodes that were merged.
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
    """A key that is equal for equal arguments. Unlike Python, it tells apart 1, 1.0 and True, and 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return value if isinstance(value, Node) else (type(value), repr(value))
