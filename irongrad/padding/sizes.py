"""The sizes of a bucket and the true sizes of a call, as values of the same symbolic expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Number: TypeAlias = int | float | torch.Tensor


def symbol(name: str) -> sympy.Symbol:
    """The symbol of the dimension called `name`."""
    return sympy.Symbol(name, integer=True, positive=True)


class Sizes:
    """What symbolic sizes are in a bucket, where they are numbers, and in a call, where they are tensors.

    Args:
        bucket: the bucket's size of each named dimension.
        true: a call's own size of each, int64 of rank 0.
    """

    def __init__(self, bucket: Mapping[str, int], true: Mapping[str, torch.Tensor]) -> None:
        self._bucket = {symbol(n): sympy.Integer(size) for n, size in bucket.items()}
        self._true = {symbol(n): size for n, size in true.items()}
        self._known: dict[sympy.Expr, Number] = {}

    def bucket(self, size: Any) -> int:
        """The size that tensors of the bucket have."""
        return size if isinstance(size, int) else int(sympy.sympify(size).xreplace(self._bucket))

    def true(self, number: Any) -> Number:
        """The number in the program without padding: a tensor where it depends on a named dimension."""
        expression = sympy.sympify(number)
        if expression not in self._known:
            self._known[expression] = self._evaluate(expression)
        return self._known[expression]

    def _evaluate(self, expression: sympy.Expr) -> Number:
        if expression.free_symbols:
            result: Number = sympy_interp(_Tensors, self._true, expression)
            return result
        return int(expression) if expression.is_Integer else float(expression)


class _Tensors(PythonReferenceAnalysis):
    """Arithmetic of Python numbers and tensors; Python's own operators where they mean the same for both."""

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else float(x)

    @staticmethod
    def truediv(a: Any, b: Any) -> Any:
        return _wide(a) / _wide(b)

    int_truediv = truediv

    @staticmethod
    def sqrt(x: Any) -> Any:
        return _wide(x) ** 0.5

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else float(value)
