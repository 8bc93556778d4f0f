"""Fourier transforms of any length, as products with small matrices of roots of unity.

A transform of length n = a * b splits into `a` transforms of length b and `b` transforms of length a. Twiddle factors
lie between them (Cooley and Tukey, "An algorithm for the machine calculation of complex Fourier series", 1965). Short
transforms are matrix products, which IREE runs fast. A transform of long prime length is a circular convolution
(Bluestein, "A linear filtering approach to the computation of discrete Fourier transform", 1970). All factors are
computed in float64 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from irongrad.operators.decompositions.pairs.pair import Pair, Value, as_pair, on_pairs, parts

aten = torch.ops.aten

LONGEST_PRODUCT = 32  # the longest transform that is one matrix product, if its length is not prime
LONGEST_PRIME = 128  # the longest transform that is one matrix product, if its length is prime


@on_pairs(aten._fft_c2c.default)
def fft_c2c(self: Pair, dim: Sequence[int], normalization: int, forward: bool) -> Pair:
    """Transform complex values along the dimensions `dim`."""
    for d in dim:
        self = _along(self, d, -1 if forward else 1)
    return self.map(_normalised(normalization, [self.re.shape[d] for d in dim]))


@on_pairs(aten._fft_r2c.default)
def fft_r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Pair:
    """Transform real values along the dimensions `dim`.

    `onesided` leaves out the second half along the last of `dim`, which mirrors the first half.
    """
    sizes = [self.shape[d] for d in dim]
    z = _along(self, dim[-1], -1)
    if onesided:
        z = z.map(lambda t: t.narrow(dim[-1], 0, sizes[-1] // 2 + 1))
    for d in dim[:-1]:
        z = _along(z, d, -1)
    return z.map(_normalised(normalization, sizes))


@on_pairs(aten._fft_c2r.default)
def fft_c2r(self: Pair, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """Invert the one-sided `fft_r2c`; the result has `last_dim_size` values along the last of `dim`."""
    for d in dim[:-1]:
        self = _along(self, d, 1)
    result = _along(_mirrored(self, dim[-1], last_dim_size), dim[-1], 1).re
    return _normalised(normalization, [result.shape[d] for d in dim])(result)


def _normalised(normalization: int, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Multiplication by the factor of fft_norm_mode (ATen/native/SpectralOpsUtils.h): 1, 1 / sqrt(n) or 1 / n."""
    n = math.prod(sizes)
    return (lambda t: t, lambda t: t * (1.0 / math.sqrt(n)), lambda t: t * (1.0 / n))[normalization]


def _mirrored(z: Pair, dim: int, n: int) -> Pair:
    """All n values of a transform of real values, from its first half: the values at k and n - k are conjugate."""
    half = n // 2 + 1
    first = z.map(lambda t: t.narrow(dim, 0, half))
    rest = first.map(lambda t: t.narrow(dim, 1, n - half).flip(dim)).conj()
    return Pair(torch.cat([first.re, rest.re], dim), torch.cat([first.im, rest.im], dim))


def _along(z: Value, dim: int, sign: int) -> Pair:
    return transform(_map_parts(z, lambda t: t.movedim(dim, -1)), sign).map(lambda t: t.movedim(-1, dim))


def transform(z: Value, sign: int) -> Pair:
    """Compute the sums of z[j] exp(sign 2 pi i j k / n) over j, along the last dimension."""
    n = _shape(z)[-1]
    if n == 1:
        return as_pair(z)
    if n <= LONGEST_PRODUCT:
        return _product(z, sign)
    divisor = next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
    if divisor > 1:
        return _in_two_steps(z, divisor, sign)
    return _product(z, sign) if n <= LONGEST_PRIME else _as_convolution(z, sign)


def _product(z: Value, sign: int) -> Pair:
    """One product with the matrix of all roots of unity, which computes both parts side by side."""
    shape = _shape(z)
    n = shape[-1]
    re, im = parts(z)
    both = re.reshape(-1, n) @ _matrix(n, sign, re.dtype)
    if isinstance(z, Pair):
        both = both + im.reshape(-1, n) @ _matrix(n, sign, re.dtype, of_imaginary=True)
    return Pair(*both.split(n, 1)).map(lambda t: t.reshape(shape))


def _in_two_steps(z: Value, a: int, sign: int) -> Pair:
    """The Cooley-Tukey step, for n = a b.

    With j = b j1 + j2 and k = k1 + a k2: transforms over j1, then twiddle factors w^(j2 k1), then transforms over j2.
    """
    shape = _shape(z)
    b = shape[-1] // a
    columns = _map_parts(z, lambda t: t.reshape(*shape[:-1], a, b).transpose(-1, -2))
    twiddled = transform(columns, sign) * _twiddles(b, a, sign, parts(z)[0].dtype)
    rows = transform(twiddled.map(lambda t: t.transpose(-1, -2)), sign)
    return rows.map(lambda t: t.transpose(-1, -2).reshape(shape))


def _as_convolution(z: Value, sign: int) -> Pair:
    """Bluestein's algorithm: a transform is a convolution, because jk = (j^2 + k^2 - (k - j)^2) / 2.

    The length m of the convolution may be any number from 2 n - 1 on.
    """
    n = _shape(z)[-1]
    m = 1 << (2 * n - 2).bit_length()
    chirp, kernel = _chirp(n, m, sign, parts(z)[0].dtype)
    padded = (chirp * z).map(lambda t: torch.nn.functional.pad(t, (0, m - n)))
    product = transform(transform(padded, -1) * kernel, 1)
    return product.map(lambda t: t[..., :n]) * chirp


def _roots(powers: np.ndarray[Any, Any], n: int, sign: int) -> np.ndarray[Any, Any]:
    """exp(sign 2 pi i p / n) for all powers p, which are first reduced modulo n."""
    turns: np.ndarray[Any, Any] = np.exp(sign * 2j * np.pi * (powers % n) / n)
    return turns


# With a cache, equal constants are one tensor object, so the graph stores them once.
@functools.lru_cache(maxsize=256)
def _matrix(n: int, sign: int, dtype: torch.dtype, *, of_imaginary: bool = False) -> Tensor:
    """The matrix that transforms the real part of a row: [c, s], the cosines and sines of 2 pi j k / n.

    The imaginary part is multiplied by [-s, c], because (x + i y)(c + i s) = (x c - y s) + i (x s + y c).
    """
    roots = _roots(np.outer(np.arange(n), np.arange(n)), n, sign)
    sides = (-roots.imag, roots.real) if of_imaginary else (roots.real, roots.imag)
    return _constant(np.concatenate(sides, 1), dtype)


@functools.lru_cache(maxsize=256)
def _twiddles(b: int, a: int, sign: int, dtype: torch.dtype) -> Pair:
    """The twiddle factors between the two transforms, exp(sign 2 pi i j k / (a b)) (Cooley and Tukey)."""
    return _constants(_roots(np.outer(np.arange(b), np.arange(a)), a * b, sign), dtype)


@functools.lru_cache(maxsize=256)
def _chirp(n: int, m: int, sign: int, dtype: torch.dtype) -> tuple[Pair, Pair]:
    """The chirp exp(sign pi i j^2 / n), and the transform of its conjugate, centred at 0, divided by m."""
    chirp = _roots(np.arange(n) ** 2, 2 * n, sign)
    around = np.zeros(m, np.complex128)
    around[:n] = chirp.conj()
    around[m - n + 1 :] = chirp.conj()[:0:-1]
    return _constants(chirp, dtype), _constants(np.fft.fft(around) / m, dtype)


def _constants(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Pair:
    return Pair(_constant(values.real, dtype), _constant(values.imag, dtype))


def _constant(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """A tensor with data, even while tensors are traced without data."""
    with _disable_current_modes():
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _shape(z: Value) -> torch.Size:
    shape: torch.Size = parts(z)[0].shape
    return shape


def _map_parts(z: Value, function: Callable[[Tensor], Tensor]) -> Value:
    if isinstance(z, Pair):
        return z.map(function)
    assert isinstance(z, Tensor)
    return function(z)
