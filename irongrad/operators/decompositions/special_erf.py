"""Error functions, the normal distribution's functions, and their inverses.

The rational approximations of erf and erfc are those of W. J. Cody, "Rational Chebyshev approximations for the error
function" (Math. Comp. 23, 1969). That of the inverse is algorithm AS 241 of M. J. Wichura, "The percentage points of
the normal distribution" (Appl. Statist. 37, 1988). All of them are accurate to float64.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.series import in_floating_point, rational

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_RSQRT_PI = 1 / math.sqrt(math.pi)
_SMALL = 0.46875  # where Cody's first interval ends
_LARGE = 4.0  # where the third begins

# Numerators and denominators of erf(x) / x in x^2, erfcx(x) in x, and (1 / sqrt(pi) - x erfcx(x)) x^2 in 1 / x^2.
_ERF = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_ERFCX = (
    (
        *(2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1),
        *(2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3),
        1.23033935479799725e3,
    ),
    (
        *(1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3),
        *(3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    ),
)
_TAIL = (
    (
        *(1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1),
        *(1.60837851487422766e-2, 6.58749161529837803e-4),
    ),
    (
        *(1.0, 2.56852019228982242, 1.87295284992346047, 5.27905102951428412e-1, 6.05183413124413191e-2),
        2.33520497626869185e-3,
    ),
)

# AS 241: quantile / (p - 1/2) in 0.180625 - (p - 1/2)^2, then the quantile in r - 1.6 and in r - 5 (`_quantile`).
_CENTRE = (
    (
        *(2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4),
        *(1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080),
    ),
    (
        *(5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4),
        *(5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
    ),
)
_SIDES = (
    (
        *(7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258),
        *(3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    ),
    (
        *(1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1),
        *(6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
    ),
)
_ENDS = (
    (
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2),
        *(2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    ),
    (
        *(2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4),
        *(1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
    ),
)


@decomposes(aten.erf.default)
def _erf(x: torch.Tensor) -> torch.Tensor:
    """Compute erf in float64; IREE 3.13.0 supports it in float32 only."""
    if x.dtype != torch.float64:
        return NotImplemented
    size = x.abs()
    beyond = 1 - _complement(size)
    return torch.where(size <= _SMALL, _erf_near_zero(x), torch.where(x < 0, -beyond, beyond))


@decomposes(aten.erfc.default, aten.special_erfc.default)
def _erfc(x: torch.Tensor) -> torch.Tensor:
    """For |x| up to 0.46875, 1 - erf(x), where erf is small; for negative x beyond, by erfc(-x) = 2 - erfc(x)."""
    x = in_floating_point(x)
    tail = _complement(x.abs())
    return torch.where(x.abs() <= _SMALL, 1 - _erf_near_zero(x), torch.where(x < 0, 2 - tail, tail))


@decomposes(aten.special_erfcx.default)
def _erfcx(x: torch.Tensor) -> torch.Tensor:
    """exp(x^2) erfc(x); for negative x by erfc(-x) = 2 - erfc(x)."""
    x = in_floating_point(x)
    size = x.abs()
    scaled = _scaled_complement(size)
    found = torch.where(x < 0, 2 * _exp_square(x, 1.0) - scaled, scaled)
    return torch.where(size <= _SMALL, (x * x).exp() * (1 - _erf_near_zero(x)), found)


@decomposes(aten.special_ndtr.default)
def _ndtr(x: torch.Tensor) -> torch.Tensor:
    """erfc(-x / sqrt(2)) / 2 (DLMF 7.20.1), which has full precision also for negative x, where it is small."""
    return 0.5 * aten.erfc.default(in_floating_point(x) * -_SQRT_HALF)


@decomposes(aten.special_log_ndtr.default)
def _log_ndtr(x: torch.Tensor) -> torch.Tensor:
    """Below -1, from the scaled complement erfcx, which does not underflow; elsewhere, from the small upper tail."""
    x = in_floating_point(x)
    scaled = x * _SQRT_HALF
    below = (aten.special_erfcx.default(-scaled.clamp(max=-_SQRT_HALF)) / 2).log() - scaled * scaled
    return torch.where(x < -1, below, torch.log1p(-aten.erfc.default(scaled) / 2))


@decomposes(aten.special_ndtri.default)
def _ndtri(x: torch.Tensor) -> torch.Tensor:
    """The normal distribution's quantile (Wichura); 1 - x is exact where it is smaller than x."""
    x = in_floating_point(x)
    return _quantile(x - 0.5, torch.minimum(x, 1 - x))


@decomposes(aten.erfinv.default)
def _erfinv(x: torch.Tensor) -> torch.Tensor:
    """The quantile at (1 + x) / 2, divided by sqrt(2), because erf(x) = 2 ndtr(x sqrt(2)) - 1."""
    x = in_floating_point(x)
    return _quantile(x / 2, (1 - x.abs()) / 2) * _SQRT_HALF


def _erf_near_zero(x: torch.Tensor) -> torch.Tensor:
    inside = x.clamp(-_SMALL, _SMALL)
    return inside * rational(inside * inside, *_ERF)


def _complement(x: torch.Tensor) -> torch.Tensor:
    """The complement erfc(x) for x >= 0.46875."""
    return _exp_square(x, -1.0) * _scaled_complement(x)


def _scaled_complement(x: torch.Tensor) -> torch.Tensor:
    """The scaled complement erfcx(x) for x >= 0.46875."""
    middle = rational(x.clamp(_SMALL, _LARGE), *_ERFCX)
    inverse = 1 / x.clamp(min=_LARGE)
    square = inverse * inverse
    return torch.where(x <= _LARGE, middle, inverse * (_RSQRT_PI - square * rational(square, *_TAIL)))


def _exp_square(x: torch.Tensor, sign: float) -> torch.Tensor:
    """exp(sign x^2) with the square in two parts (Cody).

    Otherwise the absolute rounding error of x^2 would become the relative error of the result.
    """
    x = x.clamp(-30.0, 30.0)  # beyond, the result is 0 or infinite in any case
    coarse = (x * 16).trunc() / 16
    return (sign * coarse * coarse).exp() * (sign * (x - coarse) * (x + coarse)).exp()


def _quantile(centred: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """The normal distribution's quantile at p, given p - 1/2 and the smaller of p and 1 - p, each in full precision."""
    near = centred.clamp(-0.425, 0.425)
    centre = near * rational(0.180625 - near * near, *_CENTRE)
    r = (-tail.log()).sqrt()
    sides = rational(r.clamp(max=5.0) - 1.6, *_SIDES)
    ends = rational(r.clamp(5.0, 27.5) - 5.0, *_ENDS)  # r is 27.3 for the smallest positive number
    outer = torch.where(tail == 0, math.inf, torch.where(r <= 5, sides, ends))
    outer = torch.where(tail >= 0, outer, math.nan)
    return torch.where(centred.abs() <= 0.425, centre, torch.where(centred < 0, -outer, outer))
