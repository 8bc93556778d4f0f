"""Functions of the gamma family: the log-gamma function, its derivatives, and the Hurwitz zeta function.

Formula numbers are those of the NIST Digital Library of Mathematical Functions (DLMF, https://dlmf.nist.gov).
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.series import chebyshev, in_floating_point, polynomial
from irongrad.operators.decompositions.trigonometric import near_sine

aten = torch.ops.aten

# B(2k) for k = 1, 2, ..., 9 (DLMF 24.2).
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798)
_SHIFT = 9  # from this argument on, asymptotic series with these terms are accurate to float64
_MIDDLE_END = 8.0
_TINY = 1e-17

# Chebyshev coefficients, computed with mpmath at 40 digits: of lgamma(2 + t) / (t (t + 1)), and of lgamma(5.5 + 2.5 t).
_NEAR_ZEROS = (
    0.44148902545501421,
    -0.11119580321752522,
    0.019510448260688841,
    -0.003922461463025264,
    0.00084789898959538574,
    -0.00019153855341365592,
    4.4544701849756064e-5,
    -1.05728743735943e-5,
    2.5474336873408415e-6,
    -6.208535880776316e-7,
    1.5268677399071547e-7,
    -3.7826376602913261e-8,
    9.4281008236242844e-9,
    -2.3619997021846449e-9,
    5.9435419058175461e-10,
    -1.5013129770728669e-10,
    3.8050196458110537e-11,
    -9.6724852996563246e-12,
    2.4653481983556609e-12,
    -6.2988681407917115e-13,
    1.6128460030283786e-13,
    -4.1379492068140421e-14,
    1.0635701227757898e-14,
    -2.7382420786652825e-15,
    7.0606705072148925e-16,
    -1.8232177141662119e-16,
    4.7141690067562716e-17,
)
_MIDDLE = (
    4.2797396980992029,
    3.9450988185126756,
    0.32556733750097459,
    -0.02848320523568185,
    0.0037406825494097672,
    -0.00058860697136506129,
    0.00010265809795118672,
    -1.9129016841133594e-5,
    3.7315170321594509e-6,
    -7.5259985428293558e-7,
    1.5566278944797452e-7,
    -3.2832563128974684e-8,
    7.0335473248788246e-9,
    -1.525815040231788e-9,
    3.3443357905680137e-10,
    -7.393395016155016e-11,
    1.6463103136120872e-11,
    -3.6884300411581495e-12,
    8.3071710159376577e-13,
    -1.879474919245369e-13,
    4.2691031261448742e-14,
    -9.730649087368384e-15,
    2.2247181227259756e-15,
    -5.1001983798039531e-16,
)


@decomposes(aten.lgamma.default)
def _lgamma(x: torch.Tensor) -> torch.Tensor:
    """For negative x by reflection (DLMF 5.5.3): lgamma(x) = log(pi / |x sin(pi x)|) - lgamma(-x)."""
    x = in_floating_point(x)
    size = x.abs()
    positive = _lgamma_positive(size)
    fraction = size - size.round()
    reflected = -(size * near_sine(fraction.abs() * math.pi) / math.pi).log() - positive
    reflected = torch.where(size < _TINY, positive, reflected)  # they differ by 1.2 size; the product would underflow
    found = torch.where(x < 0, reflected, positive)
    pole = (x <= 0) & (fraction == 0)
    return torch.where(pole | (size == math.inf), math.inf, found)


def _lgamma_positive(x: torch.Tensor) -> torch.Tensor:
    """Below 1 through lgamma(x + 1), below 3 with the zeros 1 and 2 as factors, from 8 by Stirling's series."""
    low = x < 1
    from_two = torch.where(low, x - 1, x - 2).clamp(-1.0, 1.0)  # for low x, (x + 1) - 2; x + 1 itself loses digits
    from_one = torch.where(low, x, x - 1).clamp(0.0, 2.0)
    near = from_two * from_one * chebyshev(from_two, _NEAR_ZEROS) - torch.where(low, x, 1.0).log()
    middle = chebyshev((x.clamp(3.0, _MIDDLE_END) - 5.5) / 2.5, _MIDDLE)
    return torch.where(x < 3, near, torch.where(x < _MIDDLE_END, middle, _stirling(x.clamp(min=_MIDDLE_END))))


def _stirling(x: torch.Tensor) -> torch.Tensor:
    """Stirling's series (DLMF 5.11.1)."""
    inverse = 1 / x
    terms = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
    series = inverse * polynomial(inverse * inverse, terms[::-1])
    return (x - 0.5) * (x.log() - 1) + (0.5 * math.log(2 * math.pi) - 0.5) + series


@decomposes(aten.digamma.default)
def _digamma(x: torch.Tensor) -> torch.Tensor:
    """The asymptotic series (DLMF 5.11.2) at x + 9 after the recurrence (5.5.2); for x < 0 the reflection (5.5.4)."""
    x = in_floating_point(x)
    size = x.abs()
    shifted = size + _SHIFT
    inverse = 1 / shifted
    square = inverse * inverse
    terms = [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]
    series = shifted.log() - inverse / 2 - square * polynomial(square, terms[::-1])
    positive = series - torch.stack([1 / (size + k) for k in range(_SHIFT)]).sum(0)
    # digamma(-s) = digamma(s + 1) + pi cot(pi s) and digamma(s + 1) = digamma(s) + 1 / s
    fraction = size - size.round()
    negative = positive + 1 / size + math.pi * _cotangent_of_pi(fraction)
    found = torch.where(x < 0, torch.where(fraction == 0, math.nan, negative), positive)
    return torch.where(x == 0, -math.inf * torch.ones_like(x).copysign(x), found)


@decomposes(aten.polygamma.default)
def _polygamma(n: int, x: torch.Tensor) -> torch.Tensor:
    """DLMF 5.15.1, and below 1/2 the reflection 5.15.6: (-1)^n psi(n, 1 - x) - psi(n, x) = pi (d/dx)^n cot(pi x)."""
    if n == 0:
        return aten.digamma.default(x)
    x = in_floating_point(x)
    below = x < 0.5
    positive = torch.where(below, 1 - x, x)
    sign = (-1) ** (n + 1)
    direct = sign * math.factorial(n) * _hurwitz(n + 1, positive)
    cotangent = _cotangent_of_pi(x - x.round())
    reflected = (-1) ** n * direct - math.pi ** (n + 1) * polynomial(cotangent, _derivative_of_cotangent(n))
    return torch.where(below, torch.where(x == x.floor(), sign * math.inf, reflected), direct)


def _cotangent_of_pi(x: torch.Tensor) -> torch.Tensor:
    """cot(pi x) for x in [-1/2, 1/2]; near 1/2 the cosine is small, so it is computed as sin(pi (1/2 - |x|))."""
    size = x.abs()
    found = near_sine(math.pi * (0.5 - size)) / near_sine(math.pi * size)
    return torch.where(x < 0, -found, found)


def _derivative_of_cotangent(n: int) -> list[float]:
    """The n-th derivative of cot(y) as a polynomial in cot(y), highest power first, by D cot = -1 - cot^2."""
    coefficients = [0.0, 1.0]  # the lowest power first
    for _ in range(n):
        slopes = [k * c for k, c in enumerate(coefficients)][1:]
        coefficients = [-(a + b) for a, b in zip([*slopes, 0.0, 0.0], [0.0, 0.0, *slopes], strict=True)]
    return coefficients[::-1]


def _hurwitz(s: int, q: torch.Tensor) -> torch.Tensor:
    """The Hurwitz zeta function for q > 0 by Euler and Maclaurin's formula (DLMF 25.11.5) after `_SHIFT` terms."""
    end = q + _SHIFT
    inverse = 1 / end
    total = torch.stack([_power(1 / (q + k), s) for k in range(_SHIFT)]).sum(0)
    rising, terms = float(s), []
    for k, bernoulli in enumerate(_BERNOULLI, 1):
        terms.append(bernoulli / math.factorial(2 * k) * rising)
        rising *= (s + 2 * k - 1) * (s + 2 * k)
    series = polynomial(inverse * inverse, terms[::-1]) * inverse
    return total + _power(inverse, s - 1) / (s - 1) + _power(inverse, s) * (0.5 + series)


def _power(x: torch.Tensor, n: int) -> torch.Tensor:
    """x^n by repeated squaring."""
    result, square = None, x
    while n:
        if n & 1:
            result = square if result is None else result * square
        n >>= 1
        square = square * square if n else square
    return torch.ones_like(x) if result is None else result
