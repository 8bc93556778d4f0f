"""Turn numbers computed from sizes (`1 / x.numel()`) into rank-0 tensors where operators take them.

As a number argument, torch-mlir 20261001 imports sums, products and quotients of whole sizes, and powers of them only
as products. It imports neither floats computed from sizes nor the minimum of two sizes. Eager computes such floats in
Python's doubles; float64 tensors give the same numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target

from irongrad.diagnostics.source_lines import line_of
from irongrad.operators.legalize.core_operators import SIZE_ARITHMETIC
from irongrad.operators.legalize.scalars import with_tensors
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.sizes.expressions import evaluated

# torch-mlir lowers a remainder in a shape, but not as a number.
_AS_NUMBERS = SIZE_ARITHMETIC - {operator.mod}
_MOST_FACTORS = 4  # of a product in place of a power


def takes_numbers_of_sizes(graph: GraphModule) -> bool:
    """Return whether `graph` has numbers computed from sizes that torch-mlir cannot import."""
    return any(_is_power(n) or any(_numbers(n)) for n in graph.graph.nodes)


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
        if _is_power(self.node):
            return math.prod([args[0]] * args[1])
        numbers = _numbers(self.node)
        if not isinstance(target, OpOverload) or not any(numbers):
            return super().call_function(target, args, kwargs)
        try:
            given = zip(numbers, (*args, *kwargs.values()), strict=True)
            values = [self._tensor(value) if is_number else value for is_number, value in given]
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


def _numbers(node: Node) -> list[bool]:
    """Whether each argument of `node`, in order, is a number computed from sizes that torch-mlir cannot import."""
    if not isinstance(node.target, OpOverload):
        return []
    types = {a.name: str(a.type) for a in node.target._schema.arguments}
    given = [*zip(types.values(), node.args, strict=False), *((types[n], value) for n, value in node.kwargs.items())]
    return [isinstance(value, Node) and _is_number(value, schema_type) for schema_type, value in given]


def _is_number(value: Node, schema_type: str) -> bool:
    """Whether an argument of type `schema_type` is a number computed from sizes that torch-mlir cannot import."""
    number = value.meta.get("val")
    if isinstance(number, torch.SymFloat):
        return True
    return isinstance(number, torch.SymInt) and "int" not in schema_type and not _is_imported(value)


def _is_imported(number: Node) -> bool:
    """Whether torch-mlir imports all the arithmetic of which the size `number` is the result."""
    seen, waiting = set(), [number]
    while waiting:
        node = waiting.pop()
        if node.target not in _AS_NUMBERS and not _is_power(node):
            return False
        seen.add(node)
        waiting += [n for n in node.all_input_nodes if n not in seen and isinstance(n.meta.get("val"), torch.SymInt)]
    return True


def _is_power(node: Node) -> bool:
    """Whether `node` is a size to the power of a small number, which is written as a product."""
    if node.target is not operator.pow or not isinstance(node.meta.get("val"), torch.SymInt):
        return False
    exponent = node.args[1]
    return isinstance(exponent, int) and 0 < exponent <= _MOST_FACTORS


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
