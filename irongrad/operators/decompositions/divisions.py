"""Remainders and floor division, exact if the dtype represents the integer quotient exactly.

torch-mlir 20261001 rounds the quotient of a floor division before the floor: 1 // 0.1 is 10 there, and 9 in eager. It
also divides integers in floating point. IREE 3.13.0 computes the float32 remainder as x minus the rounded quotient
times y, which is NaN for an infinite y. For float64 it calls a C library that is not linked.
"""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

# Splitting multiplies by _SPLITTER. So that this does not overflow, divisors above _LARGE are scaled by _SMALLER first.
_SPLITTER = {torch.float32: 2.0**12 + 1, torch.float64: 2.0**27 + 1}
_LARGE = {torch.float32: 2.0**100, torch.float64: 2.0**900}
_SMALLER = 2.0**-30


@decomposes(aten.fmod.Tensor)
def _fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    if dtype not in _SPLITTER:
        return NotImplemented
    size, divisor = x.to(dtype).abs(), y.to(dtype).abs()
    scale = torch.where(divisor > _LARGE[dtype], torch.full_like(divisor, _SMALLER), 1.0)
    rest = _minus_product(size * scale, (size / divisor).trunc(), divisor * scale) / scale
    rest = torch.where(rest < 0, rest + divisor, torch.where(rest >= divisor, rest - divisor, rest))
    rest = torch.where((rest < 0) | (rest >= divisor), 0.0, rest)  # the quotient is too large for the dtype
    rest = torch.where((size < divisor) & (size < torch.inf), size, rest)
    return torch.where(torch.signbit(x), -rest, rest)


@decomposes(aten.fmod.Scalar)
def _fmod_scalar(x: torch.Tensor, y: float) -> torch.Tensor:
    """torch-mlir 20261001 lowers `fmod` for tensors only."""
    return aten.fmod.Tensor(x, torch.full_like(x, y, dtype=torch.result_type(x, y)))


@decomposes(aten.remainder.Tensor)
def _remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if torch.result_type(x, y) not in _SPLITTER:
        return NotImplemented
    rest = aten.fmod.Tensor(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@decomposes(aten.remainder.Scalar)
def _remainder_scalar(x: torch.Tensor, y: float) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    return aten.remainder.Tensor(x, torch.full_like(x, y, dtype=dtype)) if dtype in _SPLITTER else NotImplemented


@decomposes(aten.remainder.Scalar_Tensor)
def _remainder_of_scalar(x: float, y: torch.Tensor) -> torch.Tensor:
    return aten.remainder.Tensor(torch.full_like(y, x), y)


@decomposes(aten.div.Tensor_mode)
def _div(x: torch.Tensor, y: torch.Tensor, *, rounding_mode: str | None) -> torch.Tensor:
    return _floor_divide(x, y) if rounding_mode == "floor" else NotImplemented


@decomposes(aten.div.Scalar_mode)
def _div_scalar(x: torch.Tensor, y: float, *, rounding_mode: str | None) -> torch.Tensor:
    return _floor_divide(x, y) if rounding_mode == "floor" else NotImplemented


@decomposes(aten.floor_divide.default)
def _floor_divide(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    x, y = (v.to(dtype) if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype) for v in (x, y))
    return _floor_of_quotient(x, y) if dtype in _SPLITTER else _floor_of_integers(x, y)


def _floor_of_quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As `div_floor_floating` (c10/util/generic_math.h): (x - remainder) / y is nearly an integer."""
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    exact = torch.where((rest != 0) & ((y < 0) != (rest < 0)), exact - 1, exact)
    down = exact.floor()
    whole = torch.where(exact - down > 0.5, down + 1, down)
    whole = torch.where(exact == 0, torch.zeros_like(exact).copysign(x / y), whole)
    return torch.where(y == 0, x / y, whole)


def _floor_of_integers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    quotient = torch.div(x, y, rounding_mode="trunc")
    rest = x - quotient * y
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


def _minus_product(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x - y z, corrected by the rounding error of the product (T. J. Dekker, Numer. Math. 18, 1971)."""
    product = y * z
    (y_high, y_low), (z_high, z_low) = _split(y), _split(z)
    error = y_low * z_low - (((product - y_high * z_high) - y_low * z_high) - y_high * z_low)
    return (x - product) - error


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = x * _SPLITTER[x.dtype]
    high = scaled - (scaled - x)
    return high, x - high
