"""`Pair`, a complex tensor as its real and imaginary parts, and the registry of operators on pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from irongrad.graph.recorder import Operator

Number: TypeAlias = bool | int | float | complex
Rule: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Rule)

_RULES: dict[Operator, Rule] = {}
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


def on_pairs(*operators: Operator) -> Callable[[F], F]:
    """Register a function as the rule for `operators` on complex numbers.

    The function takes the operator's arguments, with a `Pair` for every complex tensor. It returns the operator's
    results in the same form. The caller casts them to the dtype of the operator's results.

    Raises:
        ValueError: one of `operators` has a rule already.
    """

    def register(function: F) -> F:
        for operator in operators:
            if operator in _RULES:
                raise ValueError(f"{operator} has a rule for pairs already: {_RULES[operator].__module__}")
            _RULES[operator] = function
        return function

    return register


def registered() -> dict[Operator, Rule]:
    """Return all rules registered so far."""
    return dict(_RULES)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex dtype; any other dtype itself."""
    return _REAL.get(dtype, dtype)


@dataclass(frozen=True)
class Pair:
    """A complex tensor as two real tensors.

    Attributes:
        re: the real part.
        im: the imaginary part, of the same shape and dtype.
    """

    re: Tensor
    im: Tensor

    def __add__(self, other: Value) -> Pair:
        re, im = parts(other)
        return _same_shape(self.re + re, self.im + im)

    __radd__ = __add__

    def __neg__(self) -> Pair:
        return Pair(-self.re, -self.im)

    def __sub__(self, other: Value) -> Pair:
        re, im = parts(other)
        return _same_shape(self.re - re, self.im - im)

    def __rsub__(self, other: Value) -> Pair:
        return -self + other

    def __mul__(self, other: Value) -> Pair:
        if not isinstance(other, Pair | complex):
            return Pair(self.re * other, self.im * other)
        re, im = parts(other)
        return Pair(self.re * re - self.im * im, self.re * im + self.im * re)

    __rmul__ = __mul__

    def __truediv__(self, other: Value) -> Pair:
        if not isinstance(other, Pair | complex):
            return Pair(self.re / other, self.im / other)
        # Scaled so that the squares neither overflow nor underflow, as in ATen's vec256_complex_float.h.
        divisor = as_pair(other, like=self)
        scale = torch.maximum(divisor.re.abs(), divisor.im.abs())
        re, im = divisor.re / scale, divisor.im / scale
        size = (re * re + im * im) * scale
        return Pair((self.re * re + self.im * im) / size, (self.im * re - self.re * im) / size)

    def __rtruediv__(self, other: Value) -> Pair:
        return as_pair(other, like=self) / self

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """Apply `function` to each part."""
        return Pair(function(self.re), function(self.im))

    def conj(self) -> Pair:
        """Return the complex conjugate."""
        return Pair(self.re, -self.im)

    def times_i(self) -> Pair:
        """Return the product with the imaginary unit, without rounding and without inf * 0."""
        return Pair(-self.im, self.re)


Value: TypeAlias = Pair | Tensor | Number


def parts(value: Value) -> tuple[Any, Any]:
    """Return the real and the imaginary part of `value`; a real value has the number 0 as imaginary part."""
    if isinstance(value, Pair):
        return value.re, value.im
    if isinstance(value, complex):
        return value.real, value.imag
    return value, 0


def as_pair(value: Value, like: Value = 0) -> Pair:
    """Return `value` as a pair; a number takes the dtype of the parts of `like`."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        return Pair(value, torch.zeros_like(value))
    tensor, _ = parts(like)
    re, im = parts(value)
    return Pair(tensor.new_full((), re), tensor.new_full((), im))


def chosen(condition: Tensor, one: Value, other: Value) -> Pair:
    """Return `one` where `condition` holds, else `other`."""
    (a, b), (c, d) = parts(one), parts(other)
    return Pair(torch.where(condition, a, c), torch.where(condition, b, d))


def nonzero(value: Value) -> Tensor:
    """Return a boolean tensor that is true where `value` is not zero."""
    if isinstance(value, Pair):
        return (value.re != 0) | (value.im != 0)
    return torch.as_tensor(value) != 0


def _same_shape(re: Tensor, im: Tensor) -> Pair:
    """A pair whose imaginary part is broadcast to the shape of `re`: adding a larger real tensor enlarges `re` only."""
    return Pair(re, im.expand(re.shape) if im.shape != re.shape else im)
