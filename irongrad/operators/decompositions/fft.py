"""Fourier transforms of any length, as products with small matrices of roots of unity.

A length n = a * b is a transforms of length b and b of length a with factors between them (Cooley and Tukey, "An
algorithm for the machine calculation of complex Fourier series", 1965), and short lengths are matrix products,
which IREE runs fast. A long prime length is a circular convolution (Bluestein, "A linear filtering approach to the
computation of discrete Fourier transform", 1970). All factors are computed in float64 and rounded once.
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

LONGEST_PRODUCT = 32  # the longest transform that is one matrix product, but for prime numbers
LONGEST_PRIME = 128  # the longest prime number of those


@on_pairs(aten._fft_c2c.default)
def fft_c2c(self: Pair, dim: Sequence[int], normalization: int, forward: bool) -> Pair:
    """Transforms along `dim`."""
    for d in dim:
        self = _along(self, d, -1 if forward else 1)
    return self.map(_normalised(normalization, [self.re.shape[d] for d in dim]))


@on_pairs(aten._fft_r2c.default)
def fft_r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Pair:
    """Transforms of real values; `onesided` leaves out the second half along the last of `dim`, its mirror image."""
    sizes = [self.shape[d] for d in dim]
    z = _along(self, dim[-1], -1)
    if onesided:
        z = z.map(lambda t: t.narrow(dim[-1], 0, sizes[-1] // 2 + 1))
    for d in dim[:-1]:
        z = _along(z, d, -1)
    return z.map(_normalised(normalization, sizes))


@on_pairs(aten._fft_c2r.default)
def fft_c2r(self: Pair, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """The inverse of the one-sided `fft_r2c`, whose result has `last_dim_size` values along the last of `dim`."""
    for d in dim[:-1]:
        self = _along(self, d, 1)
    result = _along(_mirrored(self, dim[-1], last_dim_size), dim[-1], 1).re
    return _normalised(normalization, [result.shape[d] for d in dim])(result)


def _normalised(normalization: int, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Multiplication with the factor of fft_norm_mode (ATen/native/SpectralOpsUtils.h): 1, 1 / sqrt(n) or 1 / n."""
    n = math.prod(sizes)
    return (lambda t: t, lambda t: t * (1.0 / math.sqrt(n)), lambda t: t * (1.0 / n))[normalization]


def _mirrored(z: Pair, dim: int, n: int) -> Pair:
    """All n values of a transform of real ones, from the first half: those at k and n - k are conjugate."""
    half = n // 2 + 1
    first = z.map(lambda t: t.narrow(dim, 0, half))
    rest = first.map(lambda t: t.narrow(dim, 1, n - half).flip(dim)).conj()
    return Pair(torch.cat([first.re, rest.re], dim), torch.cat([first.im, rest.im], dim))


def _along(z: Value, dim: int, sign: int) -> Pair:
    return transform(_each(z, lambda t: t.movedim(dim, -1)), sign).map(lambda t: t.movedim(-1, dim))


def transform(z: Value, sign: int) -> Pair:
    """The sums of z[j] exp(sign 2 pi i j k / n) over j, along the last dimension."""
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
    """One product with the matrix of all roots of unity, which makes both parts side by side."""
    shape = _shape(z)
    n = shape[-1]
    re, im = parts(z)
    both = re.reshape(-1, n) @ _matrix(n, sign, re.dtype)
    if isinstance(z, Pair):
        both = both + im.reshape(-1, n) @ _matrix(n, sign, re.dtype, of_imaginary=True)
    return Pair(*both.split(n, 1)).map(lambda t: t.reshape(shape))


def _in_two_steps(z: Value, a: int, sign: int) -> Pair:
    """With n = a b, j = b j1 + j2 and k = k1 + a k2: transforms over j1, factors w^(j2 k1), transforms over j2."""
    shape = _shape(z)
    b = shape[-1] // a
    columns = _each(z, lambda t: t.reshape(*shape[:-1], a, b).transpose(-1, -2))
    turned = transform(columns, sign) * _twiddles(b, a, sign, parts(z)[0].dtype)
    rows = transform(turned.map(lambda t: t.transpose(-1, -2)), sign)
    return rows.map(lambda t: t.transpose(-1, -2).reshape(shape))


def _as_convolution(z: Value, sign: int) -> Pair:
    """With jk = (j^2 + k^2 - (k - j)^2) / 2 a transform is a convolution, of any length from 2 n - 1 on."""
    n = _shape(z)[-1]
    m = 1 << (2 * n - 2).bit_length()
    chirp, kernel = _chirp(n, m, sign, parts(z)[0].dtype)
    padded = (chirp * z).map(lambda t: torch.nn.functional.pad(t, (0, m - n)))
    product = transform(transform(padded, -1) * kernel, 1)
    return product.map(lambda t: t[..., :n]) * chirp


def _roots(powers: np.ndarray[Any, Any], n: int, sign: int) -> np.ndarray[Any, Any]:
    """exp(sign 2 pi i p / n) for all powers p, reduced first."""
    turns: np.ndarray[Any, Any] = np.exp(sign * 2j * np.pi * (powers % n) / n)
    return turns


# Equal constants of a graph are one, as the tensor is the same object.
@functools.lru_cache(maxsize=256)
def _matrix(n: int, sign: int, dtype: torch.dtype, *, of_imaginary: bool = False) -> Tensor:
    """The transform of a real row as a product: [cosines, sines] of 2 pi j k / n, or those for the imaginary part.

    From (x + i y)(c + i s) = (x c - y s) + i (x s + y c): the imaginary part meets [-s, c].
    """
    roots = _roots(np.outer(np.arange(n), np.arange(n)), n, sign)
    sides = (-roots.imag, roots.real) if of_imaginary else (roots.real, roots.imag)
    return _constant(np.concatenate(sides, 1), dtype)


@functools.lru_cache(maxsize=256)
def _twiddles(b: int, a: int, sign: int, dtype: torch.dtype) -> Pair:
    """exp(sign 2 pi i j k / (a b)), what lies between the transforms of lengths b and a (Cooley and Tukey)."""
    return _constants(_roots(np.outer(np.arange(b), np.arange(a)), a * b, sign), dtype)


@functools.lru_cache(maxsize=256)
def _chirp(n: int, m: int, sign: int, dtype: torch.dtype) -> tuple[Pair, Pair]:
    """exp(sign pi i j^2 / n), and the transform of its conjugate around 0, over m."""
    chirp = _roots(np.arange(n) ** 2, 2 * n, sign)
    around = np.zeros(m, np.complex128)
    around[:n] = chirp.conj()
    around[m - n + 1 :] = chirp.conj()[:0:-1]
    return _constants(chirp, dtype), _constants(np.fft.fft(around) / m, dtype)


def _constants(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Pair:
    return Pair(_constant(values.real, dtype), _constant(values.imag, dtype))


def _constant(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """A tensor with values, also where tensors are traced without any."""
    with _disable_current_modes():
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _shape(z: Value) -> torch.Size:
    shape: torch.Size = parts(z)[0].shape
    return shape


def _each(z: Value, function: Callable[[Tensor], Tensor]) -> Value:
    if isinstance(z, Pair):
        return z.map(function)
    assert isinstance(z, Tensor)
    return function(z)
