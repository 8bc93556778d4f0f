"""Find the nodes of a graph that share memory which an operator writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.movements import Movement, names
from irongrad.pipeline.guards.index_uses import operator_name

# Results of these may share the memory of their first operand.
_VIEWS = names(Movement.RESHAPE | Movement.CUT | Movement.SPLIT | Movement.TRANSPOSE | Movement.CAST) | {
    *("alias", "detach", "contiguous", "diagonal", "unfold", "as_strided", "narrow", "view_as_real")
}
_HARMLESS = frozenset({"detach", "requires_grad"})


def written(flat: FlatGraph) -> set[Node]:
    """Return these nodes."""
    roots: dict[Any, Any] = {}
    changed = set[Any]()
    for node in flat.nodes:
        name = operator_name(node)
        changes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if not node.args or not (changes or name in _VIEWS or node.target is operator.getitem):
            continue
        first = node.args[0] if isinstance(node.args[0], list) else [node.args[0]]
        for base in (origin for tensor in first for origin in flat.origins(tensor)):
            roots[node] = root = roots.get(base, base)
            if changes and name not in _HARMLESS:
                changed.add(root)
    return {n for n in flat.nodes if roots.get(n, n) in changed}
