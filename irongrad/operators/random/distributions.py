"""Turn random words into values of a distribution, the same in every dtype up to rounding.

Float32 and float64 runs of one program draw the same numbers. A uniform value has 24 bits, which both dtypes represent
exactly. Discrete values are decided by integers or by float64. So the float64 oracle draws the same masks as compiled
code.

A word is an int64 in [0, 2^32), as in `irongrad.operators.random.philox`.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.random.philox import BITS, MASK, Words, high_word

_FEWER_BITS = {torch.float16: 11, torch.bfloat16: 8}
_FLOAT_BITS = 24


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def uniform(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uniform values in [0, 1), in steps that `dtype` represents exactly."""
    bits = _FEWER_BITS.get(dtype, _FLOAT_BITS)
    return _upper_bits(word, bits, dtype) * 2.0**-bits


def open_uniform(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uniform values in (0, 1): odd multiples of 2^-24, never 0 or 1, so that logarithms are finite."""
    bits = _FLOAT_BITS - 1
    return (_upper_bits(word, bits, wide(dtype)) + 0.5) * 2.0**-bits


def _upper_bits(word: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    # The cast goes through int32 because few processors convert vectors of int64 to float32.
    return (word >> (BITS - bits)).to(torch.int32).to(dtype)


def below(word: torch.Tensor, probability: torch.Tensor | float) -> torch.Tensor:
    """Return booleans that are true with `probability`, to a resolution of 2^-32."""
    if isinstance(probability, torch.Tensor):
        return word < (probability.to(wide(probability.dtype)) * 2.0**BITS).round().to(torch.int64)
    return word < round(probability * 2.0**BITS)


def normal(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Return standard normal values, up to 5.8 in magnitude.

    The method is that of G. E. P. Box and M. E. Muller, Ann. Math. Statist. 29, 1958. The angle is in [-pi, pi), where
    the cosine is most accurate.
    """
    radius = (open_uniform(words[0], dtype).log() * -2.0).sqrt()
    turn = uniform(words[1], wide(dtype)) - 0.5
    return (radius * (turn * (2.0 * math.pi)).cos()).to(dtype)


def exponential(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return exponentially distributed values of mean 1, all of them positive."""
    return -open_uniform(word, dtype).log()


def cauchy(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return standard Cauchy values: the tangent of pi (u - 1/2) for uniform u.

    The tangent has poles at u = 0 and u = 1. It is computed as a cotangent of the distance from u to the nearer pole,
    which is exact.
    """
    u = open_uniform(word, dtype)
    angle = torch.where(u < 0.5, u, 1.0 - u) * math.pi
    size = angle.cos() / angle.sin()
    return torch.where(u < 0.5, -size, size)


def geometric(word: torch.Tensor, probability: float) -> torch.Tensor:
    """Return the number of trials until the first success.

    The result is float64, because an integer should not depend on rounding in float32.
    """
    if probability == 1.0:
        return torch.ones_like(word, dtype=torch.float64)
    return (open_uniform(word, torch.float64).log() / math.log1p(-probability)).ceil()


def integers(words: Words, low: int, high: int) -> torch.Tensor:
    """Return integers in [low, high).

    An integer is the upper word of the product of a random word and the length of the range (D. Lemire, "Fast random
    integer generation in an interval", ACM TOMACS 29, 2019). Lemire's rejection step is left out, so the probability of
    a value is off by up to 2^-32. For ranges longer than 2^32, an integer is the remainder of 63 random bits.
    """
    span = high - low
    if span <= MASK + 1:
        return high_word(words[0] * span) + low
    return (words[0] + (words[1] & (MASK >> 1)) * (MASK + 1)) % span + low
