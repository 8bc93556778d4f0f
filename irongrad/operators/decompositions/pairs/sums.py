"""Matrix products, and reductions other than sums of each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from irongrad.operators.decompositions.pairs.arithmetic import absolute
from irongrad.operators.decompositions.pairs.pair import Pair, on_pairs, real_dtype

aten = torch.ops.aten


@on_pairs(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def product(self: Pair, other: Pair) -> Pair:
    """The product of matrices or vectors, computed from products of their parts."""
    return Pair(self.re @ other.re - self.im @ other.im, self.re @ other.im + self.im @ other.re)


@on_pairs(aten.vdot.default)
def vdot(self: Pair, other: Pair) -> Pair:
    """The inner product; the first argument is conjugated."""
    return product(self.conj(), other)


@on_pairs(aten.prod.default)
def prod(self: Pair, *, dtype: torch.dtype | None = None) -> Pair:
    """The product of all elements."""
    return prod_dim(self.map(lambda t: t.reshape(-1)), 0)


@on_pairs(aten.prod.dim_int)
def prod_dim(self: Pair, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Pair:
    """The product along `dim`: the two halves are multiplied until one element is left."""
    if self.re.ndim == 0:
        return self
    z = self.map(lambda t: t.movedim(dim, 0))
    if z.re.shape[0] == 0:
        shape = (1, *z.re.shape[1:])
        z = Pair(z.re.new_ones(shape), z.im.new_zeros(shape))
    while (n := z.re.shape[0]) > 1:
        half = n // 2
        folded = _rows(z, 0, half) * _rows(z, half, 2 * half)
        z = folded if n % 2 == 0 else _stacked([folded, _rows(z, n - 1, n)])
    return z.map(lambda t: t.movedim(0, dim) if keepdim else t.squeeze(0))


@on_pairs(aten.cumprod.default)
def cumprod(self: Pair, dim: int, *, dtype: torch.dtype | None = None) -> Pair:
    """Running products along `dim` by doubling: after k steps each holds the product of up to 2^k elements."""
    if self.re.ndim == 0:
        return self
    z = self.map(lambda t: t.movedim(dim, 0))
    n, step = z.re.shape[0], 1
    while step < n:
        z = _stacked([_rows(z, 0, step), _rows(z, step, n) * _rows(z, 0, n - step)])
        step *= 2
    return z.map(lambda t: t.movedim(0, dim))


def _rows(z: Pair, start: int, end: int) -> Pair:
    return z.map(lambda t: t[start:end])


def _stacked(pieces: Sequence[Pair]) -> Pair:
    return Pair(torch.cat([p.re for p in pieces]), torch.cat([p.im for p in pieces]))


@on_pairs(aten.var.correction)
def var(self: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """The mean of |z - mean|^2, which is the sum of the parts' variances."""
    return aten.var.correction(self.re, *args, **kwargs) + aten.var.correction(self.im, *args, **kwargs)


@on_pairs(aten.std.correction)
def std(self: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """The root of the variance."""
    return var(self, *args, **kwargs).sqrt()


@on_pairs(aten.var_mean.correction)
def var_mean(self: Pair, dim: Sequence[int] | None = None, **kwargs: Any) -> tuple[Tensor, Pair]:
    """The variance and the mean."""
    return var(self, dim, **kwargs), _mean(self, dim, kwargs.get("keepdim", False))


@on_pairs(aten.std_mean.correction)
def std_mean(self: Pair, dim: Sequence[int] | None = None, **kwargs: Any) -> tuple[Tensor, Pair]:
    """The standard deviation and the mean."""
    return std(self, dim, **kwargs), _mean(self, dim, kwargs.get("keepdim", False))


def _mean(z: Pair, dim: Sequence[int] | None, keepdim: bool) -> Pair:
    return z.map(lambda t: t.mean(dim, keepdim))


@on_pairs(aten.linalg_vector_norm.default)
def vector_norm(self: Pair, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The vector norm of the absolute values."""
    return aten.linalg_vector_norm.default(absolute(self), *args, dtype=dtype and real_dtype(dtype))
