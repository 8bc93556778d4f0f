"""Which elements of a padded dimension are true elements, and how views move them.

A true element also exists in the program without padding. All other elements are padding. A dimension of a padded
tensor is a product of axes, outermost first: the dimension of `x.view(B * T)` has the axes B and T. Along each axis the
true elements come first. An axis without padding is merged into the axis outside it: the first B rows of 64 elements
are the first 64 * B elements. Most dimensions therefore have one axis. Two dimensions have the same padding if their
axes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from irongrad.sizes.open import is_padded_size


@dataclass(frozen=True)
class Axis:
    """One axis of a dimension.

    Attributes:
        size: the number of elements, as an expression of named dimensions. At the true sizes of a call it is the number
            of true elements, which come first.
        uniform: whether all elements are equal, as after `expand`. None of them is padding then.
    """

    size: sympy.Expr
    uniform: bool = False

    @property
    def padded(self) -> bool:
        """Whether its size depends on a dimension that is padded."""
        return is_padded_size(self.size)


Dim = tuple[Axis, ...]
Layout = tuple[Dim, ...]


def dim_of(size: Any, *, uniform: bool = False) -> Dim:
    """A dimension with one axis of `size` elements."""
    return (Axis(sympy.sympify(size), uniform),)


def layout_of(sizes: Sequence[Any], *, uniform: bool = False) -> Layout:
    """The layout of a tensor with these `sizes`, whose true elements come first in every dimension."""
    return tuple(dim_of(s, uniform=uniform) for s in sizes)


def joined(axes: Sequence[Axis]) -> Dim:
    """The dimension with these `axes`; axes of size 1 are dropped, and those without padding merge outwards."""
    result: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if result and not axis.padded:
            result[-1] = Axis(result[-1].size * axis.size)
        else:
            result.append(axis)
    return tuple(result) or dim_of(1)


def is_padded(dim: Dim) -> bool:
    """Whether any axis of the dimension has padding."""
    return any(a.padded for a in dim)


def is_uniform(dim: Dim) -> bool:
    """Whether all elements of the dimension are equal."""
    return all(a.uniform for a in dim)


def size_of(dim: Dim) -> sympy.Expr:
    """The number of elements of a dimension, as an expression of named dimensions."""
    return sympy.Mul(*(a.size for a in dim))


def solid(dim: Dim) -> Dim:
    """The same dimension with no axis marked uniform, for a result whose elements differ."""
    return joined([replace(a, uniform=False) for a in dim])


def unified(a: Dim, b: Dim) -> Dim | None:
    """The dimension that results from broadcasting `a` with `b`; None if their padding differs.

    Two dimensions of one axis each have the same padding, because the program without padding broadcasts them. Their
    sizes may be written differently, such as (T + 1) // 2 and (T - 1) // 2 + 1.
    """
    if a == b or size_of(b) == 1 or (size_of(a) != 1 and len(a) == len(b) == 1 and not a[0].uniform):
        return a
    if size_of(a) == 1 or is_uniform(a):
        return b
    return a if is_uniform(b) or solid(a) == solid(b) else None


def broadcast(layouts: Sequence[Layout]) -> Layout | None:
    """The layout that results from broadcasting tensors of these `layouts`; None if their padding differs."""
    rank = max((len(layout) for layout in layouts), default=0)
    result: list[Dim] = [dim_of(1)] * rank
    for layout in layouts:
        for i, dim in enumerate(layout, rank - len(layout)):
            both = unified(result[i], dim)
            if both is None:
                return None
            result[i] = both
    return tuple(result)


def reshaped(layout: Layout, sizes: Sequence[Any]) -> Layout | None:
    """The layout of a view with these `sizes`; None if the view mixes true elements with padding.

    Each new dimension takes axes from the innermost outwards. An axis that is larger than the rest of the dimension is
    split. After a split the true elements still come first only if the inner part has no padding.
    """
    axes = [a for dim in layout for a in dim if a.size != 1]
    result: list[Dim] = []
    for size in reversed(sizes):
        taken: list[Axis] = []
        left = sympy.sympify(size)
        while left != 1:
            if not axes:
                return None
            axis = axes.pop()
            if (outer := quotient(left, axis.size)) is not None:
                taken.insert(0, axis)
                left = outer
                continue
            rest = quotient(axis.size, left)
            if rest is None or (is_padded_size(left) and not axis.uniform):
                return None
            axes.append(Axis(rest, axis.uniform))
            taken.insert(0, Axis(left, axis.uniform))
            left = sympy.Integer(1)
        result.insert(0, joined(taken))
    return tuple(result) if not axes else None


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal at several sizes of the named dimensions, even if they are written differently."""
    names = sorted({s for size in (*a, *b) for s in sympy.sympify(size).free_symbols}, key=str)
    samples = [{name: sympy.Integer(n + 3 * i) for i, name in enumerate(names)} for n in (8, 9, 10, 11, 13)]
    return len(a) == len(b) and all(
        sympy.sympify(x).xreplace(sample) == sympy.sympify(y).xreplace(sample)
        for sample in samples
        for x, y in zip(a, b, strict=True)
    )


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """`a / b` if it is an integer for all sizes of the named dimensions; otherwise None."""
    result = sympy.cancel(a / b)
    return result if sympy.fraction(sympy.together(result))[1] == 1 else None
