"""Which elements of a dimension are true ones, and how views move them.

A dimension of a padded tensor is made of axes, the outermost first, as that of `x.view(B * T)` is of B and T. In each
axis the true elements come first. An axis of fixed size inside another is part of that: the first B of rows of 64 are
the first 64 B elements. So most dimensions have one axis, and two have the same padding where their axes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy


@dataclass(frozen=True)
class Axis:
    """One axis of a dimension.

    Attributes:
        size: how many elements it has, of which those of the true size come first.
        uniform: all its elements are equal, so that none of them is padding; as after `expand`.
    """

    size: sympy.Expr
    uniform: bool = False

    @property
    def padded(self) -> bool:
        """Whether its size depends on a named dimension."""
        return bool(self.size.free_symbols)


Dim = tuple[Axis, ...]
Layout = tuple[Dim, ...]


def dim_of(size: Any, *, uniform: bool = False) -> Dim:
    """A dimension of one axis."""
    return (Axis(sympy.sympify(size), uniform),)


def layout_of(sizes: Sequence[Any], *, uniform: bool = False) -> Layout:
    """The layout of a tensor of `sizes`, each dimension with its true elements first."""
    return tuple(dim_of(s, uniform=uniform) for s in sizes)


def joined(axes: Sequence[Axis]) -> Dim:
    """One dimension of several axes."""
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
    """Whether any axis has padding."""
    return any(a.padded for a in dim)


def is_uniform(dim: Dim) -> bool:
    """Whether all elements of the dimension are equal."""
    return all(a.uniform for a in dim)


def size_of(dim: Dim) -> sympy.Expr:
    """The size of a dimension."""
    return sympy.Mul(*(a.size for a in dim))


def solid(dim: Dim) -> Dim:
    """The dimension of a result whose elements differ, made from one with this layout."""
    return joined([replace(a, uniform=False) for a in dim])


def unified(a: Dim, b: Dim) -> Dim | None:
    """The dimension of what broadcasts `a` and `b` together; None where their padding differs.

    Two of one axis each have the same padding, as the program without padding broadcasts them: their sizes may be
    spelled differently, such as (T + 1) // 2 and (T - 1) // 2 + 1.
    """
    if a == b or size_of(b) == 1 or (size_of(a) != 1 and len(a) == len(b) == 1 and not a[0].uniform):
        return a
    if size_of(a) == 1 or is_uniform(a):
        return b
    return a if is_uniform(b) or solid(a) == solid(b) else None


def broadcast(layouts: Sequence[Layout]) -> Layout | None:
    """The layout of what broadcasts tensors of `layouts` together; None where their padding differs."""
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
    """The layout of a view of `sizes`; None where it mixes true elements with padding.

    Axes are taken from the innermost outwards. One that is larger than what a dimension still lacks is split, which
    leaves its true elements first only where the inner part is of a fixed size.
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
            if rest is None or (left.free_symbols and not axis.uniform):
                return None
            axes.append(Axis(rest, axis.uniform))
            taken.insert(0, Axis(left, axis.uniform))
            left = sympy.Integer(1)
        result.insert(0, joined(taken))
    return tuple(result) if not axes else None


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are the same, however they are spelled: at several sizes of the named dimensions."""
    names = sorted({s for size in (*a, *b) for s in sympy.sympify(size).free_symbols}, key=str)
    samples = [{name: sympy.Integer(n + 3 * i) for i, name in enumerate(names)} for n in (8, 9, 10, 11, 13)]
    return len(a) == len(b) and all(
        sympy.sympify(x).xreplace(sample) == sympy.sympify(y).xreplace(sample)
        for sample in samples
        for x, y in zip(a, b, strict=True)
    )


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """`a / b`, where that is a whole number whatever the named dimensions are."""
    result = sympy.cancel(a / b)
    return result if sympy.fraction(sympy.together(result))[1] == 1 else None
