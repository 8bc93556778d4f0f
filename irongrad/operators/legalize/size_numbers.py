"""Turn numbers computed from sizes (`1 / x.numel()`) into rank-0 tensors where operators take them.

As a number argument, torch-mlir 20261001 imports sums and products of sizes. It imports neither floats computed from
sizes nor the minimum of two sizes. Eager computes such floats in Python's doubles; float64 tensors give the same
numbers.
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
    """Return whether an operator of `graph` takes a number computed from sizes that has to become a tensor."""
    calls = (n for n in graph.graph.nodes if isinstance(n.target, OpOverload))
    return any(
        isinstance(value, Node) and _is_number(value.meta.get("val"), schema_type)
        for n in calls
        for schema_type, value in _with_types(n.target, n.args, n.kwargs)
    )


def without_numbers_of_sizes(graph: GraphModule, *values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run `graph` on `values`, with tensors in place of numbers computed from sizes.

    Raises:
        UnsupportedOpError: an operator does not accept a tensor in place of a number. The message has the user's line.
    """
    outputs: Sequence[torch.Tensor] = _WithTensors(graph, values).run(*values, enable_io_processing=False)
    return outputs


class _WithTensors(Interpreter):
    def __init__(self, graph: GraphModule, values: Sequence[torch.Tensor]) -> None:
        super().__init__(graph)
        self._sizes = _sizes_in(values)

    def run_node(self, n: Node) -> Any:
        """Run one node, and keep it in `self.node` for `call_function`."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; its result keeps the dtype that it has with Python numbers."""
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        typed = list(_with_types(target, args, kwargs))
        if not any(_is_number(value, schema_type) for schema_type, value in typed):
            return super().call_function(target, args, kwargs)
        try:
            values = [self._tensor(value) if _is_number(value, schema_type) else value for schema_type, value in typed]
            result = with_tensors(
                target, tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
            )
        except (RuntimeError, TypeError, NotImplementedError):
            raise UnsupportedOpError(
                f"{line_of(self.node)}\n  {target} takes a number that is computed from sizes, and cannot be compiled "
                "for dynamic dimensions. Leave the dimension out of dynamic=, so that its size is fixed"
            ) from None
        return result.to(self.node.meta["val"].dtype)

    def _tensor(self, number: Any) -> Any:
        return evaluated(number.node.expr, self._sizes)


def _with_types(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call in order, each with its type in the schema."""
    types = {a.name: str(a.type) for a in operator._schema.arguments}
    yield from zip(types.values(), args, strict=False)
    yield from ((types[name], value) for name, value in kwargs.items())


def _is_number(value: object, schema_type: str) -> bool:
    """Whether an argument of type `schema_type` is a number computed from sizes that torch-mlir cannot import."""
    if isinstance(value, torch.SymFloat):
        return True
    return isinstance(value, torch.SymInt) and "int" not in schema_type and not _is_imported(value.node.expr)


def _is_imported(size: sympy.Expr) -> bool:
    """Whether `size` consists of sums and products alone."""
    return size.is_polynomial() and not size.has(sympy.Pow)


def _sizes_in(values: Sequence[torch.Tensor]) -> dict[sympy.Symbol, torch.Tensor]:
    """The values of the symbols in the sizes of `values`, as rank-0 int64 tensors.

    Each size is a symbol or a multiple of a symbol.
    """
    sizes = [s for v in values for s in v.shape if isinstance(s, torch.SymInt)]
    split = [(*s.node.expr.as_coeff_Mul(), s) for s in sizes]
    return {
        one: torch.scalar_tensor(size // int(multiple), dtype=torch.int64)
        for multiple, one, size in split
        if one.is_Symbol
    }
