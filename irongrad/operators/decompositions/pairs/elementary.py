"""The exponential function, logarithms, powers, and trigonometric and hyperbolic functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from irongrad.operators.decompositions.pairs.arithmetic import absolute
from irongrad.operators.decompositions.pairs.pair import Pair, Value, as_pair, chosen, on_pairs

aten = torch.ops.aten


@on_pairs(aten.exp.default)
def exp(self: Pair) -> Pair:
    """exp(a + bi) = exp(a) (cos b + i sin b)."""
    size = self.re.exp()
    return Pair(size * self.im.cos(), size * self.im.sin())


@on_pairs(aten.exp2.default)
def exp2(self: Pair) -> Pair:
    """2 ** z."""
    return exp(self * math.log(2.0))


@on_pairs(aten.expm1.default)
def expm1(self: Pair) -> Pair:
    """exp(a) cos b - 1 = expm1(a) cos b - 2 sin(b / 2)^2, without cancellation near 0."""
    half = (self.im / 2).sin()
    return Pair(self.re.expm1() * self.im.cos() - 2 * half * half, self.re.exp() * self.im.sin())


@on_pairs(aten.log.default)
def log(self: Pair) -> Pair:
    """log|z| + i arg z."""
    return Pair(_log_of_size(self), torch.atan2(self.im, self.re))


@on_pairs(aten.log2.default)
def log2(self: Pair) -> Pair:
    """The logarithm to base 2."""
    return log(self) / math.log(2.0)


@on_pairs(aten.log10.default)
def log10(self: Pair) -> Pair:
    """The logarithm to base 10."""
    return log(self) / math.log(10.0)


@on_pairs(aten.log1p.default)
def log1p(self: Pair) -> Pair:
    """log(1 + z): log|1 + z| = log1p(2a + a^2 + b^2) / 2 near 0."""
    a, b = self.re, self.im
    near = (a.abs() < 0.5) & (b.abs() < 0.5)
    size = torch.where(near, (a * (2 + a) + b * b).log1p() / 2, _log_of_size(self + 1.0))
    return Pair(size, torch.atan2(b, 1 + a))


def _log_of_size(z: Pair) -> Tensor:
    """log|z|; near the unit circle log1p((m - 1)(m + 1) + n^2) / 2, with m the larger part and n the smaller."""
    a, b = z.re.abs(), z.im.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    near = (large > 0.5) & (large < 2) & (small < 2)
    return torch.where(near, ((large - 1) * (large + 1) + small * small).log1p() / 2, absolute(z).log())


@on_pairs(aten.sqrt.default)
def sqrt(self: Pair) -> Pair:
    """The root in the right half plane; the part without cancellation is computed first (Higham, section 1.5)."""
    a, b = self.re, self.im
    # Each term is halved before the sum: |a| + |z| could overflow.
    root = (a.abs() / 2 + absolute(self) / 2).sqrt()
    other = b / (2 * torch.where(root == 0, 1, root))
    right = Pair(root, other)
    left = Pair(other.abs(), torch.copysign(root, b))
    return chosen(a >= 0, right, left)


@on_pairs(aten.rsqrt.default)
def rsqrt(self: Pair) -> Pair:
    """1 / sqrt(z)."""
    return 1 / sqrt(self)


@on_pairs(aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.pow.Tensor_Scalar)
def power(self: Value, exponent: Value) -> Pair:
    """z ** w: by products for small whole exponents, as in ATen's pow, and as exp(w log z) for all others."""
    if isinstance(exponent, int | float) and isinstance(self, Pair):
        if exponent == 0.5:
            return sqrt(self)
        if abs(exponent) <= 4 and exponent == int(exponent):
            return _whole_power(self, int(exponent))
    base, up = as_pair(self, like=exponent), as_pair(exponent, like=self)
    is_zero = (base.re == 0) & (base.im == 0)
    at_zero = chosen((up.re == 0) & (up.im == 0), 1.0, 0.0)
    safe = chosen(is_zero, 1.0, base)
    return chosen(is_zero, at_zero, exp(up * log(safe)))


def _whole_power(z: Pair, exponent: int) -> Pair:
    if exponent < 0:
        return 1 / _whole_power(z, -exponent)
    if exponent == 0:
        return Pair(torch.ones_like(z.re), torch.zeros_like(z.im))
    half = _whole_power(z, exponent // 2) if exponent > 1 else None
    if half is None:
        return z
    return half * half * z if exponent % 2 else half * half


@on_pairs(aten.sinh.default)
def sinh(self: Pair) -> Pair:
    """sinh a cos b + i cosh a sin b."""
    return Pair(self.re.sinh() * self.im.cos(), self.re.cosh() * self.im.sin())


@on_pairs(aten.cosh.default)
def cosh(self: Pair) -> Pair:
    """cosh a cos b + i sinh a sin b."""
    return Pair(self.re.cosh() * self.im.cos(), self.re.sinh() * self.im.sin())


@on_pairs(aten.tanh.default)
def tanh(self: Pair) -> Pair:
    """(t (1 + s^2) + i s (1 - t^2)) / (1 + t^2 s^2) with t = tanh a, s = tan b.

    Numerator and denominator are multiplied by cos(b)^2, and 1 - t^2 is computed as 1 / cosh(a)^2. So nothing
    overflows (Kahan, CTANH).
    """
    t, c, s = self.re.tanh(), self.im.cos(), self.im.sin()
    narrow = 1 / self.re.cosh()
    below = c * c + t * t * s * s
    return Pair(t / below, s * c * narrow * narrow / below)


@on_pairs(aten.sin.default)
def sin(self: Pair) -> Pair:
    """sin z = -i sinh(iz)."""
    return _times_minus_i(sinh(self.times_i()))


@on_pairs(aten.cos.default)
def cos(self: Pair) -> Pair:
    """cos z = cosh(iz)."""
    return cosh(self.times_i())


@on_pairs(aten.tan.default)
def tan(self: Pair) -> Pair:
    """tan z = -i tanh(iz)."""
    return _times_minus_i(tanh(self.times_i()))


@on_pairs(aten.sigmoid.default)
def sigmoid(self: Pair) -> Pair:
    """1 / (1 + exp(-z))."""
    return 1 / (exp(-self) + 1.0)


def _times_minus_i(z: Pair) -> Pair:
    """-i z."""
    return Pair(z.im, -z.re)
