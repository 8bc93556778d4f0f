"""Sizes that are known only when a step runs, as values of type `index` for the importer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv, Mod
from torch_mlir.dialects import arith
from torch_mlir.ir import Context, Value

from irongrad.pipeline.lower.dynamic_slices import constant_index, size_of


class SizeValues:
    """The values of symbolic sizes, computed from the sizes of tensors at the insertion point.

    Args:
        tensors: nodes with their values. A symbol is known if it is a size of one of them, or divides one.
        context: the MLIR context.
    """

    def __init__(self, tensors: Iterable[tuple[Node, Value]], context: Context) -> None:
        self._context = context
        self._known: dict[sympy.Symbol, Callable[[], Value]] = {}
        for node, value in tensors:
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    self._note(size.node.expr, value, dim)

    def value(self, size: int | torch.SymInt) -> Value:
        """The value of a size.

        Raises:
            KeyError: the size depends on a symbol that is unknown, or is no arithmetic of integers.
        """
        return self._value(size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size))

    def _note(self, expression: sympy.Expr, value: Value, dim: int) -> None:
        multiple, one = expression.as_coeff_Mul()
        if not one.is_Symbol or one in self._known:
            return

        def made() -> Value:
            size = size_of(value, dim)
            return (
                size if multiple == 1 else arith.FloorDivSIOp(size, constant_index(int(multiple), self._context)).result
            )

        self._known[one] = made

    def _value(self, expression: sympy.Expr) -> Value:
        if expression.is_Integer:
            return constant_index(int(expression), self._context)
        if expression.is_Symbol:
            return self._known[expression]()
        operation = _OPERATIONS[expression.func]
        return reduce(lambda a, b: operation(a, b).result, map(self._value, expression.args))


_OPERATIONS = {
    sympy.Add: arith.AddIOp,
    sympy.Mul: arith.MulIOp,
    FloorDiv: arith.FloorDivSIOp,
    Mod: arith.RemSIOp,
}
