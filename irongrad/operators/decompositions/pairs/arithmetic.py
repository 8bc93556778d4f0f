"""Arithmetic of complex numbers: sums, products, quotients, conjugates, absolute values, comparisons."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from irongrad.operators.decompositions.pairs.pair import Number, Pair, Value, as_pair, chosen, nonzero, on_pairs, parts

aten = torch.ops.aten
prims = torch.ops.prims


@on_pairs(aten.add.Tensor, aten.add.Scalar)
def add(self: Value, other: Value, alpha: Number = 1) -> Pair:
    """self + alpha * other."""
    return as_pair(self, other) + (other if alpha == 1 else scaled(other, alpha))


@on_pairs(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Value, other: Value, alpha: Number = 1) -> Pair:
    """self - alpha * other."""
    return as_pair(self, other) - (other if alpha == 1 else scaled(other, alpha))


@on_pairs(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self: Value, other: Value, alpha: Number = 1) -> Pair:
    """other - alpha * self."""
    return sub(other, self, alpha)


def scaled(value: Value, factor: Number) -> Value:
    """Multiply `value` by a number; a real tensor times a complex number is a pair."""
    if isinstance(value, Tensor) and isinstance(factor, complex):
        return Pair(value * factor.real, value * factor.imag)
    return value * factor


@on_pairs(aten.mul.Tensor, aten.mul.Scalar)
def mul(self: Value, other: Value) -> Value:
    """self * other; a real tensor scales both parts."""
    if isinstance(self, Pair) or isinstance(other, Pair):
        return self * other
    return scaled(self, other) if isinstance(self, Tensor) else scaled(other, self)


@on_pairs(aten.div.Tensor, aten.div.Scalar)
def div(self: Value, other: Value) -> Pair:
    """self / other."""
    return as_pair(self, other) / other


@on_pairs(aten.reciprocal.default)
def reciprocal(self: Pair) -> Pair:
    """1 / self."""
    return 1 / self


@on_pairs(aten.square.default)
def square(self: Pair) -> Pair:
    """self * self."""
    return self * self


@on_pairs(aten._conj.default, aten._conj_copy.default, aten._conj_physical.default, aten.conj_physical.default)
def conj(self: Value) -> Value:
    """The complex conjugate; autograd also takes the conjugate of Python numbers."""
    if isinstance(self, Pair):
        return self.conj()
    return self.conjugate() if isinstance(self, complex) else self


@on_pairs(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(self: Pair) -> Pair:
    """Return `self`: a pair has no conjugate or negative bit to resolve."""
    return self


@on_pairs(aten.real.default)
def real(self: Pair) -> Tensor:
    """The real part."""
    return self.re


@on_pairs(aten.imag.default)
def imag(self: Pair) -> Tensor:
    """The imaginary part."""
    return self.im


@on_pairs(aten.complex.default)
def complex_(real: Tensor, imag: Tensor) -> Pair:
    """real + i * imag."""
    re, im = torch.broadcast_tensors(real, imag)
    return Pair(re, im)


@on_pairs(aten.polar.default)
def polar(abs: Tensor, angle: Tensor) -> Pair:
    """abs * exp(i * angle)."""
    return Pair(abs * angle.cos(), abs * angle.sin())


@on_pairs(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(self: Pair) -> Tensor:
    """Stack both parts along a new last dimension."""
    return torch.stack([self.re, self.im], -1)


@on_pairs(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(self: Tensor) -> Pair:
    """Split a last dimension of size 2 into real and imaginary part."""
    return Pair(self.select(-1, 0), self.select(-1, 1))


@on_pairs(aten.abs.default)
def absolute(self: Pair) -> Tensor:
    """sqrt(re^2 + im^2), scaled by the larger part so that the squares neither overflow nor underflow."""
    a, b = self.re.abs(), self.im.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / torch.where(large == 0, 1, large)
    size = large * (1 + ratio * ratio).sqrt()
    # An infinite part makes the absolute value infinite, whatever the other one is (C99, hypot).
    return torch.where((a == torch.inf) | (b == torch.inf), torch.inf, size)


@on_pairs(aten.angle.default)
def angle(self: Pair) -> Tensor:
    """The argument, from -pi to pi."""
    return torch.atan2(self.im, self.re)


@on_pairs(aten.sgn.default)
def sgn(self: Pair) -> Pair:
    """self / |self|, and 0 for 0."""
    size = absolute(self)
    return chosen(size == 0, 0.0, self / torch.where(size == 0, 1, size))


@on_pairs(aten.where.self, prims.where.default)
def where(condition: Tensor, self: Value, other: Value) -> Pair:
    """self where `condition` holds, else other."""
    return chosen(condition, self, other)


@on_pairs(aten.eq.Tensor, aten.eq.Scalar, prims.eq.default)
def eq(self: Value, other: Value) -> Tensor:
    """Whether both parts are equal."""
    (a, b), (c, d) = parts(self), parts(other)
    return _truth(a == c) & _truth(b == d)


@on_pairs(aten.ne.Tensor, aten.ne.Scalar, prims.ne.default)
def ne(self: Value, other: Value) -> Tensor:
    """Whether at least one part differs."""
    return ~eq(self, other)


def _truth(value: Tensor | bool) -> Tensor:
    return torch.as_tensor(value)


def _logical(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Value, Value], Tensor]:
    return lambda self, other: combine(nonzero(self), nonzero(other))


on_pairs(aten.logical_and.default)(_logical(operator.and_))
on_pairs(aten.logical_or.default)(_logical(operator.or_))
on_pairs(aten.logical_xor.default)(_logical(operator.xor))


@on_pairs(aten.logical_not.default)
def logical_not(self: Pair) -> Tensor:
    """Whether self is zero."""
    return ~nonzero(self)
