"""Random words -> values of a distribution, the same up to rounding in every dtype.

Float32 and float64 runs of one program draw the same numbers: a uniform has 24 bits, which both hold exactly, and
what decides between discrete values is an integer or a float64. So the float64 oracle has the masks of compiled code.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.random.philox import BITS, MASK, Words, high_word

_FEWER_BITS = {torch.float16: 11, torch.bfloat16: 8}
_FLOAT_BITS = 24


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


def uniform(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[0, 1) in steps that `dtype` holds exactly."""
    bits = _FEWER_BITS.get(dtype, _FLOAT_BITS)
    return _upper_bits(word, bits, dtype) * 2.0**-bits


def open_uniform(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(0, 1), the odd multiples of 2^-24: neither end, so that logarithms are finite."""
    bits = _FLOAT_BITS - 1
    return (_upper_bits(word, bits, wide(dtype)) + 0.5) * 2.0**-bits


def _upper_bits(word: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    # By way of int32: few processors convert vectors of int64 to float32.
    return (word >> (BITS - bits)).to(torch.int32).to(dtype)


def below(word: torch.Tensor, probability: torch.Tensor | float) -> torch.Tensor:
    """True with the given probability, to 32 bits."""
    if isinstance(probability, torch.Tensor):
        return word < (probability.to(wide(probability.dtype)) * 2.0**BITS).round().to(torch.int64)
    return word < round(probability * 2.0**BITS)


def normal(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values (G. E. P. Box and M. E. Muller, Ann. Math. Statist. 29, 1958), up to 5.8 in magnitude.

    The angle is in [-pi, pi), where a cosine is the most accurate.
    """
    radius = (open_uniform(words[0], dtype).log() * -2.0).sqrt()
    turn = uniform(words[1], wide(dtype)) - 0.5
    return (radius * (turn * (2.0 * math.pi)).cos()).to(dtype)


def exponential(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exponentially distributed values of mean 1, all of them positive."""
    return -open_uniform(word, dtype).log()


def cauchy(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard Cauchy values: the tangent of pi (u - 1/2), as a cotangent of the distance to the nearer end.

    The tangent has its poles where u is near 0 and 1; the distance to those is exact.
    """
    u = open_uniform(word, dtype)
    angle = torch.where(u < 0.5, u, 1.0 - u) * math.pi
    size = angle.cos() / angle.sin()
    return torch.where(u < 0.5, -size, size)


def geometric(word: torch.Tensor, probability: float) -> torch.Tensor:
    """How many trials until the first success, as float64: an integer should not depend on rounding in float32."""
    if probability == 1.0:
        return torch.ones_like(word, dtype=torch.float64)
    return (open_uniform(word, torch.float64).log() / math.log1p(-probability)).ceil()


def integers(words: Words, low: int, high: int) -> torch.Tensor:
    """Integers in [low, high).

    The upper word of a product of a word and the range (D. Lemire, "Fast random integer generation in an interval",
    ACM TOMACS 29, 2019, without the rejection: a value's probability is off by up to 2^-32). Ranges beyond 2^32 take
    the remainder of 63 bits.
    """
    span = high - low
    if span <= MASK + 1:
        return high_word(words[0] * span) + low
    return (words[0] + (words[1] & (MASK >> 1)) * (MASK + 1)) % span + low
