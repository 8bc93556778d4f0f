"""Keeping the order in which a graph computes things."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from irongrad.passes.memory.fusion import is_root, readers, source
from irongrad.passes.rewrite import call, replace

aten = torch.ops.aten

# As many kernels apart, two terms are not worth computing in one.
_FAR = 30


def separate_late_sums(graph: Graph) -> int:
    """Have sums of an early and a late value, such as the gradients of tied weights, read both from memory.

    IREE 3.13.0 computes `early + late` in the kernel of `early` where nothing else reads that, and then moves all that
    `late` is computed from before it: the whole backward but for the gradients of weights, which then come last, and
    keep everything that they read until then. A sum over a stack of both does not fuse.

    Returns:
        How many sums were changed.
    """
    late = _late_sums(graph)
    for node in late:
        with graph.inserting_before(node):
            both = call(graph, aten.stack.default, list(node.args), like=node)
            replace(node, call(graph, aten.sum.dim_IntList, both, [0], like=node))
    return len(late)


def with_late_sums_early(graph: Graph) -> Graph:
    """A graph in the order in which IREE 3.13.0 computes `graph`, where that has sums of an early and a late value.

    Returns:
        A copy; or `graph` itself, where it has none.
    """
    late = _late_sums(graph)
    if not late:
        return graph
    copy = Graph()
    new_of: dict[Node, Node] = {}
    copy.output(copy.graph_copy(graph, new_of))
    for node in late:
        _move_before_early(new_of[node])
    return copy


def _move_before_early(node: Node) -> None:
    """Move what the late term of a sum is computed from before the kernel of the early one."""
    position = {n: i for i, n in enumerate(node.graph.nodes)}
    terms = sorted((source(n) for n in node.all_input_nodes), key=position.__getitem__)
    early, stack = terms[0], [terms[-1]]
    needed: set[Node] = set()
    while stack:
        value = stack.pop()
        if value not in needed and position[value] > position[early]:
            needed.add(value)
            stack.extend(value.all_input_nodes)
    for value in sorted(needed, key=position.__getitem__):
        early.prepend(value)


def _late_sums(graph: Graph) -> list[Node]:
    roots = {n: i for i, n in enumerate(n for n in graph.nodes if is_root(n))}
    sums = (n for n in graph.nodes if n.target is aten.add.Tensor and not n.kwargs)
    return [n for n in sums if _is_late(n, roots)]


def _is_late(node: Node, roots: dict[Node, int]) -> bool:
    terms = [a for a in node.args if isinstance(a, Node) and a.meta["val"].shape == node.meta["val"].shape]
    made = [source(t) for t in terms]
    if len(made) != 2 or not all(m in roots for m in made):
        return False
    early = min(made, key=roots.__getitem__)
    return abs(roots[made[0]] - roots[made[1]]) > _FAR and readers(early) == [node]
