"""`expm1`, hyperbolic functions, their inverses, and logarithms.

IREE 3.13.0 computes asinh and acosh from the square of their argument, which overflows. For `log10`, and for `tanh` and
`log2` in float64, it calls a C library that is not linked. Near zero it loses the digits of sinh and atanh, and of
expm1 in float64.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.series import computes_in, polynomial, signed

aten = torch.ops.aten

_EXPM1 = [1 / math.factorial(k + 1) for k in range(14, -1, -1)]  # Taylor series of expm1(x) / x, highest power first
_SQUARABLE = 1e8  # above this, asinh(x) equals log(2 x) in float64


@decomposes(aten.expm1.default)
@computes_in(torch.float64)
def _expm1(x: torch.Tensor) -> torch.Tensor:
    """The Taylor series up to |x| = 0.35. Beyond, exp(x) - 1 loses less than two bits."""
    near = x.clamp(-0.35, 0.35)
    return torch.where(x.abs() <= 0.35, near * polynomial(near, _EXPM1), x.exp() - 1)


@decomposes(aten.sinh.default)
@computes_in(torch.float32, torch.float64)
def _sinh(x: torch.Tensor) -> torch.Tensor:
    """From expm1 up to |x| = 1.

    For larger x, from the square of exp(x / 2): this factor does not overflow before the result does.
    """
    size = x.abs()
    growth = size.clamp(max=1.0).expm1()
    root = (size / 2).exp()
    large = root * (root / 2) - 0.5 / root / root
    return signed(torch.where(size <= 1, (growth + growth / (growth + 1)) / 2, large), x)


@decomposes(aten.tanh.default)
@computes_in(torch.float64)
def _tanh(x: torch.Tensor) -> torch.Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), from expm1(-2 |x|), so that nothing cancels near zero or overflows."""
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
    """log((1 + x) / (1 - x)) / 2 (DLMF 4.37.24), as log1p(2 x / (1 - x)) / 2."""
    size = x.abs()
    return signed(0.5 * (2 * size / (1 - size)).log1p(), x)


@decomposes(aten.log1p.default)
@computes_in(torch.float64)
def _log1p(x: torch.Tensor) -> torch.Tensor:
    """log(u) x / (u - 1) with u = 1 + x.

    The errors of both factors cancel (D. Goldberg, ACM Comput. Surv. 23, 1991, theorem 4).
    """
    raised = 1 + x
    growth = raised - 1
    unchanged = (growth == 0) | (x == math.inf)
    return torch.where(unchanged, x, raised.log() * (x / torch.where(unchanged, 1.0, growth)))


@decomposes(aten.logaddexp.default)
@computes_in(torch.float32, torch.float64)
def _logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Equal operands have a formula of their own: the difference of two infinities of one sign is NaN."""
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
