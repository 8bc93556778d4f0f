"""Powers of real numbers, with the special values of IEEE 754's `pow` (section 9.2), as in C and eager.

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
