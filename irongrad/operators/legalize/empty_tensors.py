"""Fold empty tensors, and results that follow from an empty operand, into constants.

iree-compile 3.13.0 crashes with a division by zero (SIGFPE) on a product over no elements, a gather of no elements
and other operators on empty tensors. Their results follow from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule, Node

from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten

# The results of reductions over no elements.
_REDUCED = {
    aten.sum.default: 0,
    aten.sum.dim_IntList: 0,
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.prod.default: 1,
    aten.prod.dim_int: 1,
    aten.mean.default: float("nan"),
    aten.mean.dim: float("nan"),
    aten.any.default: False,
    aten.any.dim: False,
    aten.all.default: True,
    aten.all.dim: True,
}

# Operators that write to positions of their first argument; with an empty index or source they return it unchanged.
_WRITES = frozenset(
    {
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.index_put.default,
        aten.slice_scatter.default,
    }
)


def fold_empty_tensors(graph: GraphModule) -> None:
    """Replace empty tensors, and results that follow from an empty operand, by constants; changes `graph` in place."""
    folded = False
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        rule = _rule(node)
        if rule is None:
            continue
        with graph.graph.inserting_before(node):
            replacement = rule(graph.graph, node)
        if replacement is not node:
            node.replace_all_uses_with(replacement)
            graph.graph.erase_node(node)
        folded = True
    if folded:
        graph.graph.eliminate_dead_code()
        graph.recompile()


def _rule(node: Node) -> Callable[[Graph, Node], Node] | None:
    if _has_no_elements(node.meta["val"]):
        return None if node.target is aten.empty.memory_format else lambda graph, node: _full(graph, node, 0)
    if not any(_is_empty(i) for i in node.all_input_nodes):
        return None
    if node.target in _REDUCED:
        return lambda graph, node: _full(graph, node, _REDUCED[node.target])
    if node.target is aten.constant_pad_nd.default:
        return lambda graph, node: _full(graph, node, node.args[2] if len(node.args) > 2 else 0)
    if node.target is aten.cat.default:
        return _without_empty_parts
    if node.target in _WRITES and not _is_empty(node.args[0]):
        return lambda graph, node: node.args[0]
    return None


def _is_empty(value: object) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and _has_no_elements(tensor)


def _has_no_elements(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is empty for every size that its dynamic dimensions may have.

    The range of a size decides. `statically_known_true` would also use guards, and a trace may have left some that hold
    for the example alone.
    """
    return any(
        size == 0 if is_known(size) else size.node.shape_env.bound_sympy(size.node.expr).upper == 0
        for size in tensor.shape
    )


def _full(graph: Graph, node: Node, value: float) -> Node:
    """Return the constant result of `node`; `node` itself if it has a symbol that is no operand's size."""
    like, shape = node.meta["val"], _shape(graph, node)
    if shape is None:
        return node
    if not _has_no_elements(like):
        replacement = graph.call_function(aten.full.default, (shape, value), {"dtype": like.dtype})
    else:
        replacement = graph.call_function(aten.empty.memory_format, (shape,), {"dtype": like.dtype})
    replacement.meta = dict(node.meta)
    return replacement


def _shape(graph: Graph, node: Node) -> list[int | Node] | None:
    """Return the sizes of a result for an operator's arguments: a symbol is the size of an operand."""
    places = {
        size.node.expr: (operand, dim)
        for operand in node.all_input_nodes
        if isinstance(operand.meta.get("val"), torch.Tensor)
        for dim, size in enumerate(operand.meta["val"].shape)
        if not is_known(size)
    }
    shape: list[int | Node] = []
    for size in node.meta["val"].shape:
        if is_known(size):
            shape.append(size)
        elif size.node.expr in places:
            read = graph.call_function(aten.sym_size.int, places[size.node.expr])
            read.meta["val"] = size
            shape.append(read)
        else:
            return None
    return shape


def _without_empty_parts(graph: Graph, node: Node) -> Node:
    node.args = ([part for part in node.args[0] if not _is_empty(part)], *node.args[1:])
    return node
