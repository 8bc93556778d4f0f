"""Writes of a tensor's own elements into the tensor: the writes go to a copy of it.

IREE 3.13.0 writes in place, into the memory from which the kernel reads the new elements. The numbers of
`h.index_add(0, rows, h[32:])` are wrong then. `h[rows] = h` does not compile ("write affecting operations on global
resources"), and reshapes of one tensor are confused ("mismatch in shape of indices and update value", or a crash).
tests/pipeline/lower/test_scatters.py tells when IREE is right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from irongrad.graph.movements import OF_ONE_TENSOR, Movement, operators
from irongrad.graph.nodes import bodies, call

aten = torch.ops.aten

# With casts, which MLIR folds if they widen a number and narrow it again.
_MOVES = OF_ONE_TENSOR | Movement.CAST


def written_to_copies(graph: GraphModule) -> GraphModule:
    """A copy of `graph` in which no write into a tensor reads the tensor itself; `graph` if it has no such write."""
    if not any(_writes_its_own(node) for g in _all_graphs(graph) for node in g.nodes):
        return graph
    graph = copy.deepcopy(graph)
    for inner in _all_graphs(graph):
        for node in list(inner.nodes):
            if _writes_its_own(node):
                _copy_first(inner, node)
    return graph


def _all_graphs(graph: GraphModule) -> Iterator[Graph]:
    yield graph.graph
    for _, body in bodies(graph):
        yield from _all_graphs(body)


def _writes_its_own(node: Node) -> bool:
    if node.target is not aten.index_put.default:
        return False
    written, indices, values, *_ = node.args
    root = _root(written)
    if root is not written and _is_computed_from(values, root):
        return True
    return any(_root(v) is root for v in (*indices, values) if isinstance(v, Node))


def _root(node: Node) -> Node:
    """The tensor that `node` has elements of. A computed value is a root: its kernel ends before the write."""
    while node.target in operators(_MOVES):
        node = node.args[0]
    return node


def _is_computed_from(value: Node, root: Node) -> bool:
    """Whether `value` is computed from elements of `root`, each by itself.

    IREE takes such a computation into the kernel of a write into a part of `root`, as in `h[0, columns] += 1`.
    """
    seen: set[Node] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if node is root:
            return True
        if node not in seen and _is_elementwise(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def _is_elementwise(node: Node) -> bool:
    if node.target in operators(_MOVES | Movement.GATHER):
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _copy_first(graph: Graph, node: Node) -> None:
    """Choose between the tensor and a number by a condition that is always false, which MLIR does not know."""
    written, indices, *_ = node.args
    index = next(i for i in indices if i is not None)
    with graph.inserting_before(node):
        first = index
        for _ in range(index.meta["val"].ndim):
            first = call(graph, aten.select.int, first, 0, 0, like=node)
        never = call(graph, aten.lt.Scalar, call(graph, aten.abs.default, first, like=node), 0, like=node)
        number = call(graph, aten.full.default, [], 1, dtype=written.meta["val"].dtype, like=node)
        own = call(graph, aten.where.self, never, number, written, like=node)
    node.args = (own, *node.args[1:])
