"""Rewrite concatenations along inner dimensions as one elementwise function of their parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import replace, value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.inline import inline
from irongrad.passes.stack_by_position import stack_by_position

aten = torch.ops.aten


@dataclass(frozen=True)
class Interleave:
    """Turn a concatenation of elementwise functions along an inner dimension into one elementwise function.

    Before:
        y = cat([exp(a), sin(b)], 1)                              # a and b [N, C]
    After:
        first = arange(2).view(1, 2, 1) == 0
        y = where(first, exp(a).view(N, 1, C), sin(b).view(N, 1, C)).view(N, 2 * C)

    IREE 3.13.0 computes each part separately and copies its rows into place, with one kernel for each. The gates of a
    recurrent cell take four such kernels at every step. As one function they take one kernel, or none if it fuses
    further. In exchange, each of n parts is computed n times.

    Left alone: parts of different sizes, more than `parts` of them, and parts that are not elementwise functions. So
    are concatenations along the first dimension, whose parts are contiguous.

    Attributes:
        parts: the most parts of a concatenation that is rewritten.
    """

    name: ClassVar[str] = "interleave"

    parts: int = 4

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        found = [node for node in graph.graph.nodes if self._is_candidate(node)]
        for node in found:
            dim = node.args[1] % value_of(node).ndim
            replace(node, inline(_Concatenation(node.target, dim), node.args[0], node))
        return PassResult(bool(found), {"interleaved": len(found)})

    def _is_candidate(self, node: Node) -> bool:
        if node.target not in (aten.cat.default, aten.stack.default) or len(node.args) < 2:
            return False
        parts: Any = node.args[0]
        values = [value_of(p) for p in parts]
        leading = value_of(node).shape[: node.args[1]]
        return (
            1 < len(parts) <= self.parts
            and math.prod(leading) > 1
            and len({(v.shape, v.dtype) for v in values}) == 1
            and all(is_elementwise(p) for p in parts)
        )


@dataclass(frozen=True)
class _Concatenation:
    """`cat` or `stack` along `dim`, as a function of tensors."""

    operator: OpOverload
    dim: int

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        result = stack_by_position(parts, self.dim)
        return result if self.operator is aten.stack.default else result.flatten(self.dim, self.dim + 1)


def is_elementwise(node: Node) -> bool:
    """Whether `node` computes each element of its result from one element of each operand."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


PASS = Interleave
