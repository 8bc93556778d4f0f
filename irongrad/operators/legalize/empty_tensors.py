"""Tensors without elements are constants, and what is computed from them is too.

iree-compile 3.13.0 ends with a division by zero (SIGFPE) on a product over no elements, on gathers of nothing and
others. What they give is known from their shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

# What operators that reduce over no elements give.
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

# Operators that write the elements of another tensor into their first argument: nothing, here.
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
    """Replace every tensor without elements, and what operators make of such tensors, by what it is known to be."""
    folded = False
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        rule = _rule(node)
        if rule is None:
            continue
        with graph.graph.inserting_before(node):
            made = rule(graph.graph, node)
        if made is not node:
            node.replace_all_uses_with(made)
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
    """Whether that is so at every size that a dimension may have."""
    return any(statically_known_true(size == 0) for size in tensor.shape)


def _full(graph: Graph, node: Node, value: float) -> Node:
    like = node.meta["val"]
    if like.numel():
        made = graph.call_function(aten.full.default, (list(like.shape), value), {"dtype": like.dtype})
    else:
        made = graph.call_function(aten.empty.memory_format, (list(like.shape),), {"dtype": like.dtype})
    made.meta = dict(node.meta)
    return made


def _without_empty_parts(graph: Graph, node: Node) -> Node:
    node.args = ([part for part in node.args[0] if not _is_empty(part)], *node.args[1:])
    return node
