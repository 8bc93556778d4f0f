"""Inverse trigonometric and hyperbolic functions, on the branches of Kahan (1987), which C99 and ATen also use."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.pairs.elementary import log1p, sqrt
from irongrad.operators.decompositions.pairs.pair import Pair, on_pairs

aten = torch.ops.aten


@on_pairs(aten.asinh.default)
def asinh(self: Pair) -> Pair:
    """asinh z = -i asin(iz)."""
    turned = asin(self.times_i())
    return Pair(turned.im, -turned.re)


@on_pairs(aten.asin.default)
def asin(self: Pair) -> Pair:
    """Kahan's CASIN: from the roots of 1 - z and 1 + z."""
    low, high = sqrt(1.0 - self), sqrt(self + 1.0)
    re = torch.atan2(self.re, low.re * high.re - low.im * high.im)
    im = (low.re * high.im - low.im * high.re).asinh()
    return Pair(re, im)


@on_pairs(aten.acos.default)
def acos(self: Pair) -> Pair:
    """Kahan's CACOS."""
    low, high = sqrt(1.0 - self), sqrt(self + 1.0)
    im = (high.re * low.im - high.im * low.re).asinh()
    return Pair(2 * torch.atan2(low.re, high.re), im)


@on_pairs(aten.acosh.default)
def acosh(self: Pair) -> Pair:
    """Kahan's CACOSH."""
    low, high = sqrt(self - 1.0), sqrt(self + 1.0)
    re = (low.re * high.re + low.im * high.im).asinh()
    return Pair(re, 2 * torch.atan2(low.im, high.re))


@on_pairs(aten.atanh.default)
def atanh(self: Pair) -> Pair:
    """(log(1 + z) - log(1 - z)) / 2."""
    return (log1p(self) - log1p(-self)) * 0.5


@on_pairs(aten.atan.default)
def atan(self: Pair) -> Pair:
    """atan z = -i atanh(iz)."""
    turned = atanh(self.times_i())
    return Pair(turned.im, -turned.re)
