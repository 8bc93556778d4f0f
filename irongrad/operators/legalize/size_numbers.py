"""Numbers that are computed from sizes (`1 / x.numel()`) become rank-0 tensors where operators take them.

torch-mlir 20261001 takes sums and products of sizes where an operator has a number, but no floats of them, nor the
smaller of two. Eager computes such floats as Python's doubles; float64 here gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target

from irongrad.diagnostics.source_lines import line_of
from irongrad.operators.legalize.scalars import with_tensors
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.sizes.expressions import evaluated


def takes_numbers_of_sizes(graph: GraphModule) -> bool:
    """Whether an operator of `graph` takes a number that is computed from sizes, and has to become a tensor."""
    calls = (n for n in graph.graph.nodes if isinstance(n.target, OpOverload))
    return any(
        isinstance(value, Node) and _is_number(value.meta.get("val"), kind)
        for n in calls
        for kind, value in _by_kind(n.target, n.args, n.kwargs)
    )


def without_numbers_of_sizes(graph: GraphModule, *values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run `graph` on `values`, with tensors in place of such numbers.

    Raises:
        UnsupportedOpError: an operator that takes no tensor in place of one; with the user's line.
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
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        given = list(_by_kind(target, args, kwargs))
        if not any(_is_number(value, kind) for kind, value in given):
            return super().call_function(target, args, kwargs)
        try:
            values = [self._tensor(value) if _is_number(value, kind) else value for kind, value in given]
            result = with_tensors(
                target, tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
            )
        except (RuntimeError, TypeError, NotImplementedError):
            raise UnsupportedOpError(
                f"{line_of(self.node)}\n  {target} takes a number that is computed from sizes, and cannot be compiled "
                "so for every size. Leave the dimension out of dynamic=, so that its size is fixed"
            ) from None
        return result.to(self.node.meta["val"].dtype)

    def _tensor(self, number: Any) -> Any:
        return evaluated(number.node.expr, self._sizes)


def _by_kind(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each argument that is given, in order, with the type that the schema has for it."""
    kinds = {a.name: str(a.type) for a in operator._schema.arguments}
    yield from zip(kinds.values(), args, strict=False)
    yield from ((kinds[name], value) for name, value in kwargs.items())


def _is_number(value: object, kind: str) -> bool:
    """Whether an argument of the schema's type `kind` is a number of sizes that torch-mlir cannot take."""
    if isinstance(value, torch.SymFloat):
        return True
    return isinstance(value, torch.SymInt) and "int" not in kind and not _is_imported(value.node.expr)


def _is_imported(size: sympy.Expr) -> bool:
    """Whether `size` is made by sums and products alone."""
    return size.is_polynomial() and not size.has(sympy.Pow)


def _sizes_in(values: Sequence[torch.Tensor]) -> dict[sympy.Symbol, torch.Tensor]:
    """What the symbols in the sizes of `values` are, int64 of rank 0; a size is one, or a multiple of one."""
    sizes = [s for v in values for s in v.shape if isinstance(s, torch.SymInt)]
    split = [(*s.node.expr.as_coeff_Mul(), s) for s in sizes]
    return {
        one: torch.scalar_tensor(size // int(multiple), dtype=torch.int64)
        for multiple, one, size in split
        if one.is_Symbol
    }
