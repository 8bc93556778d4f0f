"""The cost of computing a node, in seconds on an ordinary machine; only the ratios matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from irongrad.memory_model.kernel_roles import (
    bodies_of,
    bytes_of,
    is_constant,
    is_control,
    is_item,
    is_pointwise,
    is_view,
)
from irongrad.memory_model.loops_and_branches import iterations_of

aten = torch.ops.aten

# Per second, for one core and its share of memory bandwidth. Rough figures suffice: only the ratios matter.
_FLOPS = 50e9
_BYTES = 5e9
_ELEMENTS = 2e9
_TRANSCENDENTAL = 2  # the code is vectorised, and much of its time is waiting for memory
_CHOICE = 0.2

_EXPENSIVE: frozenset[Any] = frozenset(
    {
        aten.cos.default,
        aten.div.Tensor,
        aten.erf.default,
        aten.exp.default,
        aten.expm1.default,
        aten.log.default,
        aten.log1p.default,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.rsqrt.default,
        aten.sigmoid.default,
        aten.sin.default,
        aten.sqrt.default,
        aten.tanh.default,
    }
)


def has_flops(node: Node) -> bool:
    """Whether a node is a contraction or a convolution, of which PyTorch counts floating point operations."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def flops(node: Node, value_of: Callable[[Node], Any] = lambda node: node.meta["val"]) -> int:
    """Floating point operations of a contraction or convolution by PyTorch's own formulas; 0 for other nodes.

    Args:
        node: the node.
        value_of: the fake value of a node, whose sizes count.
    """
    if not has_flops(node):
        return 0
    formula = flop_registry[node.target.overloadpacket]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    return int(formula(*args, **kwargs, out_val=value_of(node)))


def cost(node: Node) -> float:
    """The cost of computing `node`, in seconds."""
    if node.op != "call_function" or is_view(node) or is_constant(node) or is_item(node):
        return 0.0
    if is_control(node):
        return iterations_of(node) * sum(cost(inner) for body in bodies_of(node) for inner in body.nodes)
    if is_pointwise(node):
        return float(math.prod(node.meta["val"].shape) * _weight(node) / _ELEMENTS)
    moved = bytes_of(node) + sum(bytes_of(n) for n in node.all_input_nodes)
    return max(flops(node) / _FLOPS, moved / _BYTES)


def _weight(node: Node) -> float:
    """The cost of one element of elementwise `node`, relative to an addition."""
    if node.target is aten.where.self:
        return _CHOICE
    return _TRANSCENDENTAL if node.target in _EXPENSIVE else 1.0
