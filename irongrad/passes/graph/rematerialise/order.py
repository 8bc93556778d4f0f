"""Separate sums that make IREE compute the backward in an order that takes more memory."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from irongrad.graph.nodes import call, replace
from irongrad.memory_model.kernel_roles import is_root, readers, source

aten = torch.ops.aten

# Two terms that are this many kernels apart gain nothing from sharing a kernel.
_FAR = 30


def separate_late_sums(graph: Graph) -> int:
    """Make IREE read both terms of a sum from memory if it computes one much earlier than the other.

    The gradients of tied weights are such terms. IREE 3.13.0 computes `early + late` in the kernel of `early` if
    nothing else reads `early`. It then moves everything that `late` depends on before that kernel. That is the whole
    backward except the gradients of weights. These are then computed last, and everything that they read stays in
    memory until then. A sum over a stack of both terms does not fuse.

    Returns:
        The number of sums that were changed.
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
    computed = [source(t) for t in terms]
    if len(computed) != 2 or not all(m in roots for m in computed):
        return False
    early = min(computed, key=roots.__getitem__)
    return abs(roots[computed[0]] - roots[computed[1]]) > _FAR and readers(early) == [node]
