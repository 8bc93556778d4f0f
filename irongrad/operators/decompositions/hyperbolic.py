"""Exponentials minus one, hyperbolic functions, and the logarithms that invert them.

IREE 3.13.0 computes asinh and acosh from the square of their argument, which overflows, calls a C library that is not
linked for `log10`, and float64's `tanh` and `log2`, and loses the digits of sinh, atanh and float64's expm1 near zero.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.series import computes_in, polynomial, signed

aten = torch.ops.aten

_EXPM1 = [1 / math.factorial(k + 1) for k in range(14, -1, -1)]  # Taylor's for expm1(x) / x, the highest power first
_SQUARABLE = 1e8  # beyond, asinh(x) is log(2 x) to float64


@decomposes(aten.expm1.default)
@computes_in(torch.float64)
def _expm1(x: torch.Tensor) -> torch.Tensor:
    """Taylor's series up to 0.35, from where the difference loses less than two bits."""
    near = x.clamp(-0.35, 0.35)
    return torch.where(x.abs() <= 0.35, near * polynomial(near, _EXPM1), x.exp() - 1)


@decomposes(aten.sinh.default)
@computes_in(torch.float32, torch.float64)
def _sinh(x: torch.Tensor) -> torch.Tensor:
    """From expm1; for large x as the square of exp(x / 2), which does not overflow before the result."""
    size = x.abs()
    growth = size.clamp(max=1.0).expm1()
    root = (size / 2).exp()
    large = root * (root / 2) - 0.5 / root / root
    return signed(torch.where(size <= 1, (growth + growth / (growth + 1)) / 2, large), x)


@decomposes(aten.tanh.default)
@computes_in(torch.float64)
def _tanh(x: torch.Tensor) -> torch.Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), by its expm1, so that nothing cancels near zero or overflows."""
    decay = (-2 * x.abs()).expm1()
    return signed(-decay / (decay + 2), x)


@decomposes(aten.asinh.default)
@computes_in(torch.float32, torch.float64)
def _asinh(x: torch.Tensor) -> torch.Tensor:
    """log(x + sqrt(x^2 + 1)) as log1p(x + x^2 / (1 + sqrt(x^2 + 1)))."""
    size = x.abs()
    near = size.clamp(max=_SQUARABLE)
    square = near * near
    small = (near + square / (1 + (square + 1).sqrt())).log1p()
    return signed(torch.where(size <= _SQUARABLE, small, size.log() + math.log(2)), x)


@decomposes(aten.acosh.default)
@computes_in(torch.float32, torch.float64)
def _acosh(x: torch.Tensor) -> torch.Tensor:
    """log(x + sqrt(x^2 - 1)) as a function of x - 1."""
    near = x.clamp(max=_SQUARABLE) - 1
    small = (near + near.sqrt() * (near + 2).sqrt()).log1p()
    return torch.where(x > _SQUARABLE, x.log() + math.log(2), small)


@decomposes(aten.atanh.default)
@computes_in(torch.float32, torch.float64)
def _atanh(x: torch.Tensor) -> torch.Tensor:
    """log((1 + x) / (1 - x)) / 2 (DLMF 4.37.24), as a logarithm of 1 and a small number."""
    size = x.abs()
    return signed(0.5 * (2 * size / (1 - size)).log1p(), x)


@decomposes(aten.log1p.default)
@computes_in(torch.float64)
def _log1p(x: torch.Tensor) -> torch.Tensor:
    """log(u) x / (u - 1) with u = 1 + x, whose errors cancel (D. Goldberg, ACM Comput. Surv. 23, 1991, theorem 4)."""
    raised = 1 + x
    growth = raised - 1
    unchanged = (growth == 0) | (x == math.inf)
    return torch.where(unchanged, x, raised.log() * (x / torch.where(unchanged, 1.0, growth)))


@decomposes(aten.logaddexp.default)
@computes_in(torch.float32, torch.float64)
def _logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Infinities of one sign are their own sum."""
    return torch.where(x == y, x + math.log(2), torch.maximum(x, y) + (-(x - y).abs()).exp().log1p())


@decomposes(aten.logaddexp2.default)
@computes_in(torch.float32, torch.float64)
def _logaddexp2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    sum_over_larger = (-(x - y).abs()).exp2().log1p() * (1 / math.log(2))
    return torch.where(x == y, x + 1, torch.maximum(x, y) + sum_over_larger)


@decomposes(aten.log2.default)
@computes_in(torch.float64)
def _log2(x: torch.Tensor) -> torch.Tensor:
    return x.log() * (1 / math.log(2))


@decomposes(aten.log10.default)
@computes_in(torch.float32, torch.float64)
def _log10(x: torch.Tensor) -> torch.Tensor:
    return x.log() * (1 / math.log(10))
