"""Floats that are computed from sizes (`1 / x.numel()`) become rank-0 float64 tensors where operators take them.

torch-mlir 20261001 takes a size where an operator has a number, but no float of one. Eager computes such floats as
Python's doubles; float64 here gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target
from torch.utils._pytree import tree_any, tree_map

from irongrad.padding.sizes import evaluated
from irongrad.pipeline.scalars import with_tensors
from irongrad.pipeline.usercode import line_of
from irongrad.runtime.errors import UnsupportedOpError


def takes_floats_of_sizes(graph: GraphModule) -> bool:
    """Whether an operator of `graph` takes a float that is computed from sizes."""
    floats = (n for n in graph.graph.nodes if _is_float(n.meta.get("val")))
    return any(isinstance(user.target, OpOverload) for n in floats for user in n.users)


def without_floats_of_sizes(graph: GraphModule, *values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run `graph` on `values`, with tensors in place of floats that are computed from sizes.

    Raises:
        UnsupportedOpError: an operator that takes no tensor in place of such a float; with the user's line.
    """
    outputs: Sequence[torch.Tensor] = _WithTensors(graph, values).run(*values, enable_io_processing=False)
    return outputs


class _WithTensors(Interpreter):
    def __init__(self, graph: GraphModule, values: Sequence[torch.Tensor]) -> None:
        super().__init__(graph)
        self._sizes = _sizes_in(values)

    def run_node(self, n: Node) -> Any:
        """Run one node; remember it for `call_function`."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; its result has the dtype that it has with a Python number."""
        if not isinstance(target, OpOverload) or not tree_any(_is_float, (args, kwargs)):
            return super().call_function(target, args, kwargs)
        args, kwargs = tree_map(self._tensor, (args, kwargs))
        try:
            result = with_tensors(target, args, kwargs)
        except (RuntimeError, TypeError):
            raise UnsupportedOpError(
                f"{line_of(self.node)}: {target} takes a float that is computed from sizes, and cannot be compiled so "
                "for every size. Give buckets=, or make a tensor of the number: torch.full((), number)"
            ) from None
        return result.to(self.node.meta["val"].dtype)

    def _tensor(self, value: Any) -> Any:
        return evaluated(value.node.expr, self._sizes) if _is_float(value) else value


def _is_float(value: object) -> bool:
    return isinstance(value, torch.SymFloat)


def _sizes_in(values: Sequence[torch.Tensor]) -> dict[sympy.Symbol, torch.Tensor]:
    """What the symbols in the sizes of `values` are, int64 of rank 0; a size is one, or a multiple of one."""
    sizes = [s for v in values for s in v.shape if isinstance(s, torch.SymInt)]
    split = [(*s.node.expr.as_coeff_Mul(), s) for s in sizes]
    return {
        one: torch.scalar_tensor(size // int(multiple), dtype=torch.int64)
        for multiple, one, size in split
        if one.is_Symbol
    }
