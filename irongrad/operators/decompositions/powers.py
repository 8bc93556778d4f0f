"""Powers of real numbers and integers, with the special values of IEEE 754's `pow` (section 9.2), as in C and eager.

IREE 3.13.0 computes exp(y log x), which is NaN for 0 ** 0, 1 ** inf and every negative x. A power of a negative
constant is 0 in IREE.
"""

from __future__ import annotations

import math

import torch

from irongrad.graph.recorder import undecomposed
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

_FACTORS = 8  # the largest whole exponent that is computed by products


@decomposes(aten.pow.Tensor_Tensor)
def _pow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    if _is_integer(dtype):
        return _power_of_integers(x.to(dtype), y.to(dtype))
    if not dtype.is_floating_point or _is_on_host(x, y, dtype):
        return NotImplemented
    x, y = x.to(dtype), y.to(dtype)
    size, whole = x.abs(), y.floor() == y
    odd = whole & ((y / 2).floor() * 2 != y)
    power = _power_of_size(size, y)
    power = torch.where((x < 0) & (size < math.inf) & ~whole, math.nan, power)
    power = torch.where(odd & torch.signbit(x), -power, power)
    return torch.where((y == 0) | (x == 1) | ((size == 1) & (y.abs() == math.inf)), 1.0, power)


@decomposes(aten.pow.Scalar)
def _pow_of_number(x: float, y: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    if _is_integer(dtype):
        return _power_of_integers(int(x), y)
    if not dtype.is_floating_point or _is_on_host(y, y, dtype):
        return NotImplemented
    if x == 1:
        return torch.ones_like(y, dtype=dtype)
    if 0 < x < math.inf:
        with undecomposed():
            return aten.pow.Scalar(x, y.to(dtype))
    return aten.pow.Tensor_Tensor(torch.full_like(y, x, dtype=dtype), y)


@decomposes(aten.pow.Tensor_Scalar)
def _pow_of_tensor(x: torch.Tensor, y: float) -> torch.Tensor:
    """Compute square roots and small whole exponents by roots and products, as eager does for the most common ones."""
    dtype = torch.result_type(x, y)
    if dtype.is_complex or _is_on_host(x, x, dtype) or (x.is_floating_point() and y in (1, 2)):
        return NotImplemented
    x = x.to(dtype)
    if y == 0:
        return torch.ones_like(x)
    if not dtype.is_floating_point:
        return _product(x, int(y))
    if abs(y) == 0.5:
        return x.sqrt() if y > 0 else x.rsqrt()
    if abs(y) <= _FACTORS and y == int(y):
        product = _product(x, abs(int(y)))
        return product if y > 0 else 1 / product
    return aten.pow.Tensor_Tensor(x, torch.full((), y, dtype=dtype))


def _power_of_size(size: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with undecomposed():
        return aten.pow.Tensor_Tensor(size, y)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _power_of_integers(x: torch.Tensor | int, y: torch.Tensor) -> torch.Tensor:
    """Multiply the squares of squares that the bits of `y` choose; the product wraps around, as eager's does.

    With a negative exponent the power is 1 divided by a whole number, rounded towards zero.
    """
    odd = (y & 1) != 0
    power = torch.where(odd, x, 1)
    square = x
    for bit in range(1, torch.iinfo(y.dtype).bits - 1):
        square = square * square if isinstance(square, torch.Tensor) else _in_int64(square * square)
        power = torch.where((y & (1 << bit)) != 0, power * square, power)
    if isinstance(x, torch.Tensor):
        inverse = torch.where(x == 1, 1, torch.where(x == -1, torch.where(odd, -1, 1), 0))
        return torch.where(y < 0, inverse, power).to(y.dtype)
    return torch.where(y < 0, torch.where(odd, x, 1) if x in (1, -1) else 0, power).to(y.dtype)


def _in_int64(number: int) -> int:
    """`number` as int64 wraps it; of narrower integers the low bits are the same."""
    return (number + 2**63) % 2**64 - 2**63


def _product(x: torch.Tensor, factors: int) -> torch.Tensor:
    if factors == 1:
        return x
    half = _product(x, factors // 2)
    return half * half * x if factors % 2 else half * half


def _is_on_host(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the result is a float64 scalar, whose power the host's C library computes.

    The pass `irongrad.passes.module.scalars_on_host` moves it there.
    """
    return dtype is torch.float64 and not (x.ndim or y.ndim)
