"""Trigonometric functions and their inverses.

For float64, IREE 3.13.0 calls a C library that is not linked (`undefined symbol: sin`). Its float32 sine and cosine
reduce the argument in one step; they are wrong by 1e-4 at 1000 and infinite at 1e17. Its arctangent is wrong by 34
ulps.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.series import chebyshev, computes_in, polynomial, signed

aten = torch.ops.aten

# pi / 2 as a sum of parts of half a significand each. The product of a part with half the bits of a quotient is exact
# (W. J. Cody and W. Waite, "Software Manual for the Elementary Functions", 1980, chapter 8).
_HALF_PI_PARTS = {
    torch.float32: (
        1.5703125,
        0.0004837512969970703,
        7.549533620476723e-08,
        2.5632829192545614e-12,
        6.123031769111886e-17,
        2.0216294170795996e-21,
    ),
    torch.float64: (
        1.5707963109016418,
        1.5893254712295857e-08,
        6.123233932053594e-17,
        6.368317055225283e-25,
        1.0828566716053562e-32,
        2.316557719485773e-41,
    ),
}
_HALF_QUOTIENT = {torch.float32: 4096.0, torch.float64: 67108864.0}

# Taylor coefficients of sin(x) / x and cos(x) in x^2, for |x| up to pi / 2.
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(12)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(13)]
_TERMS = {torch.float32: 7, torch.float64: 13}

# atan(x) / x as a Chebyshev series in x^2 for x^2 in [0, tan(pi/8)^2], computed with mpmath at 40 digits.
_TAN_EIGHTH = math.sqrt(2) - 1
_ARCTANGENT = (
    0.97341023034474414,
    -0.02595272048264835,
    0.00061895297492369026,
    -1.7537493335454731e-5,
    5.4057685950161328e-7,
    -1.7519588845815831e-8,
    5.8702818881027481e-10,
    -2.01424319791343e-11,
    7.0355322000591042e-13,
    -2.491686527572419e-14,
    8.9227365548556066e-16,
    -3.2243077275353687e-17,
)


@decomposes(aten.sin.default)
@computes_in(torch.float32, torch.float64)
def _sin(x: torch.Tensor) -> torch.Tensor:
    quarters, rest = _quarter_turns(x)
    return torch.where(x == 0, x, _sine(quarters, rest))


@decomposes(aten.cos.default)
@computes_in(torch.float32, torch.float64)
def _cos(x: torch.Tensor) -> torch.Tensor:
    quarters, rest = _quarter_turns(x)
    return _cosine(quarters, rest)


@decomposes(aten.tan.default)
@computes_in(torch.float32, torch.float64)
def _tan(x: torch.Tensor) -> torch.Tensor:
    quarters, rest = _quarter_turns(x)
    return torch.where(x == 0, x, _sine(quarters, rest) / _cosine(quarters, rest))


def _quarter_turns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split x into quarter turns, modulo 4, and a rest of magnitude up to about pi / 4.

    The split is right as long as the quotient is known to half a turn: up to |x| = 6e6 in float32, and 3e15 in float64.
    """
    quarters = (x * (2 / math.pi)).round()
    half = _HALF_QUOTIENT[x.dtype]
    high = (quarters / half).round() * half
    low, rest = quarters - high, x
    for part in _HALF_PI_PARTS[x.dtype]:
        rest = rest - high * part - low * part
    return quarters - 4 * (quarters / 4).floor(), rest.clamp(-2.0, 2.0)


def _sine(quarters: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The sine of zero to four quarter turns and the rest."""
    value = torch.where((quarters == 1) | (quarters == 3), _near_cosine(rest), near_sine(rest))
    return torch.where((quarters == 2) | (quarters == 3), -value, value)


def _cosine(quarters: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The cosine of zero to four quarter turns and the rest."""
    value = torch.where((quarters == 1) | (quarters == 3), near_sine(rest), _near_cosine(rest))
    return torch.where((quarters == 1) | (quarters == 2), -value, value)


def near_sine(x: torch.Tensor) -> torch.Tensor:
    """Return the sine of x for |x| up to pi / 2."""
    return x * polynomial(x * x, _SINE[: _TERMS[x.dtype]][::-1])


def _near_cosine(x: torch.Tensor) -> torch.Tensor:
    """The cosine of x for |x| up to pi / 2."""
    return polynomial(x * x, _COSINE[: _TERMS[x.dtype]][::-1])


@decomposes(aten.atan.default)
@computes_in(torch.float32, torch.float64)
def _atan(x: torch.Tensor) -> torch.Tensor:
    """From tan(pi/8) to tan(3 pi/8) as pi/4 + atan((x - 1) / (x + 1)), beyond as pi/2 - atan(1 / x)."""
    size = x.abs()
    near, far = size <= _TAN_EIGHTH, size > 1 / _TAN_EIGHTH
    reduced = torch.where(near, size, torch.where(far, -1 / size, (size - 1) / (size + 1)))
    reduced = reduced.clamp(-_TAN_EIGHTH, _TAN_EIGHTH)
    series = reduced * chebyshev(reduced * reduced * (2 / _TAN_EIGHTH**2) - 1, _ARCTANGENT)
    return signed(torch.where(near, series, torch.where(far, series + math.pi / 2, series + math.pi / 4)), x)


@decomposes(aten.asin.default)
@computes_in(torch.float64)
def _asin(x: torch.Tensor) -> torch.Tensor:
    """atan(x / sqrt(1 - x^2)), with 1 - x^2 as (1 - x) (1 + x), which does not cancel near 1."""
    return (x / ((1 - x) * (1 + x)).sqrt()).atan()


@decomposes(aten.acos.default)
@computes_in(torch.float64)
def _acos(x: torch.Tensor) -> torch.Tensor:
    """From tan(a / 2) = sqrt((1 - cos a) / (1 + cos a)) (DLMF 4.21.22), which is exact near 1."""
    return 2 * ((1 - x) / (1 + x)).sqrt().atan()


@decomposes(aten.atan2.default)
@computes_in(torch.float32, torch.float64)
def _atan2(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """From the angle in the first quadrant; signed zeros and infinities as in C (ISO C 2011, F.10.1.4)."""
    height, width = y.abs(), x.abs()
    ratio = torch.where((height == width) & (height == math.inf), 1.0, height / width)
    angle = torch.where((height == 0) & (width == 0), 0.0, ratio).atan()
    return torch.where(torch.signbit(x), math.pi - angle, angle).copysign(y)
