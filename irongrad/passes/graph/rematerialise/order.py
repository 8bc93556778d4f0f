"""Keeping the order in which a graph computes things."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from irongrad.graph.nodes import call, replace
from irongrad.memory_model.kernel_roles import is_root, readers, source

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
