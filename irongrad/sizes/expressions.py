"""Values of symbolic size expressions: at the sizes of a bucket, and at the true sizes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Number: TypeAlias = int | float | torch.Tensor


def symbol(name: str) -> sympy.Symbol:
    """The symbol of the dimension called `name`."""
    return sympy.Symbol(name, integer=True, positive=True)


def unit(name: str, multiple: int) -> sympy.Symbol:
    """The symbol of the dimension called `name` divided by `multiple`, which divides it."""
    return symbol(f"{name}/{multiple}")


def unit_of(expression: sympy.Symbol) -> tuple[str, int] | None:
    """The dimension's name and the divisor of a symbol that `unit` made; None for other symbols."""
    name, _, multiple = expression.name.partition("/")
    return (name, int(multiple)) if multiple else None


def in_dimensions(expression: Any) -> Any:
    """Rewrite `expression` without the symbols of `unit`, in terms of named dimensions."""
    units = {s: found for s in expression.free_symbols if (found := unit_of(s)) is not None}
    whole = expression.xreplace({s: symbol(name) / multiple for s, (name, multiple) in units.items()})
    if all(number.is_Integer for number in whole.atoms(sympy.Rational)):
        return whole
    return expression.xreplace({s: FloorDiv(symbol(name), sympy.Integer(k)) for s, (name, k) in units.items()})


class Sizes:
    """The values of symbolic sizes: numbers in a bucket, and tensors in a call.

    Args:
        bucket: the bucket's size of each named dimension.
        true: the call's true size of each named dimension, int64 of rank 0.
        units: symbols that `unit` made, which get values too.
        open_sizes: the value of each symbol of an open dimension, and of each unit of one (`irongrad.sizes.open`).
    """

    def __init__(
        self,
        bucket: Mapping[str, int],
        true: Mapping[str, torch.Tensor],
        units: Iterable[sympy.Symbol] = (),
        open_sizes: Mapping[sympy.Symbol, Any] | None = None,
    ) -> None:
        self._bucket = {symbol(n): sympy.Integer(size) for n, size in bucket.items()}
        self._open = dict(open_sizes or {})
        self._true = {symbol(n): size for n, size in true.items()}
        self._true |= {one: self._true_size(one, true) for one in (*units, *self._open)}
        for one, (name, multiple) in ((s, unit_of(s) or ("", 1)) for s in units):
            self._bucket[one] = sympy.Integer(bucket[name] // multiple)
        self._known: dict[sympy.Expr, Number] = {}

    @staticmethod
    def _true_size(one: sympy.Symbol, true: Mapping[str, torch.Tensor]) -> torch.Tensor:
        name, multiple = unit_of(one) or (one.name, 1)
        return torch.div(true[name], multiple, rounding_mode="floor") if multiple > 1 else true[name]

    def bucket(self, size: Any) -> Any:
        """The value of a size in the bucket: an int, or a symbolic number if it depends on an open dimension."""
        if isinstance(size, int):
            return size
        expression = sympy.sympify(size).xreplace(self._bucket)
        return self.open(expression) if expression.free_symbols else int(expression)

    def open(self, number: sympy.Expr) -> Any:
        """The value of a number that depends on open dimensions alone; a symbolic one in a trace."""
        return sympy_interp(PythonReferenceAnalysis, self._open, number)

    def true(self, number: Any) -> Number:
        """The value of a number in the program without padding; a tensor if it depends on a named dimension."""
        expression = sympy.sympify(number)
        if expression not in self._known:
            self._known[expression] = evaluated(expression, self._true)
        return self._known[expression]


def evaluated(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, torch.Tensor]) -> Number:
    """The value of `expression`, whose symbols are int64 tensors of rank 0; a Python number if it has no symbols.

    Floats are computed in float64, as in Python.
    """
    if expression.free_symbols:
        result: Number = sympy_interp(_Tensors, dict(sizes), expression)
        return result
    return int(expression) if expression.is_Integer else float(expression)


class _Tensors(PythonReferenceAnalysis):
    """Arithmetic on Python numbers and tensors; it overrides only operations in which the two differ."""

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
    def floor(x: Any) -> Any:
        return torch.floor(x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return torch.floor(x).to(dtype)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return torch.ceil(x).to(dtype)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return torch.trunc(x).to(dtype)

    @staticmethod
    def round_to_int(x: Any, dtype: torch.dtype) -> Any:
        return torch.round(x).to(dtype)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else float(value)
