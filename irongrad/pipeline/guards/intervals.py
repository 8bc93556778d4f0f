"""Intervals of numbers whose ends may be expressions of symbolic sizes, and arithmetic on them.

Every rule errs on the wide side: an end that cannot be decided is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

INFINITE = math.inf


@dataclass(frozen=True)
class Interval:
    """Numbers between two ends.

    Attributes:
        low: the least number: a number, an expression of sizes, or minus infinity.
        high: the largest number.
        points: further single numbers outside of the ends.
        exact: whether both ends occur, whatever the values of the inputs.
    """

    low: Any = -INFINITE
    high: Any = INFINITE
    points: frozenset[int] = frozenset()
    exact: bool = False

    @property
    def is_number(self) -> bool:
        """Whether there is one number only."""
        return not self.points and self.low == self.high

    def whole(self) -> Interval:
        """The interval that holds the single points too."""
        if not self.points:
            return self
        return Interval(lower([self.low, *self.points]), higher([self.high, *self.points]))


UNKNOWN = Interval()


def number(value: Any) -> Interval:
    """The interval of one number."""
    return Interval(value, value, exact=True)


def at_most(a: Any, b: Any) -> bool:
    """Whether `a <= b` for all sizes; sizes are positive."""
    if a == -INFINITE or b == INFINITE:
        return True
    if a == INFINITE or b == -INFINITE:
        return False
    if not _is_symbolic(a) and not _is_symbolic(b):
        return bool(a <= b)
    difference = sympy.expand(sympy.sympify(b) - sympy.sympify(a))
    # A size is 1 more than a number that is not negative.
    more = {s: sympy.Dummy(integer=True, nonnegative=True) + 1 for s in difference.free_symbols}
    return bool(sympy.expand(difference.xreplace(more)).is_nonnegative)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, sympy.Basic) and bool(value.free_symbols)


def lower(ends: Iterable[Any]) -> Any:
    """The least of several lower ends; minus infinity if that is undecided."""
    every = list(ends)
    return next((a for a in every if all(at_most(a, b) for b in every)), -INFINITE)


def higher(ends: Iterable[Any]) -> Any:
    """The largest of several upper ends; infinity if that is undecided."""
    every = list(ends)
    return next((a for a in every if all(at_most(b, a) for b in every)), INFINITE)


def cut_above(own: Any, limit: Any) -> Any:
    """The upper end of numbers that are at most `own` and at most `limit`; `limit` if that is undecided."""
    return own if at_most(own, limit) else limit


def cut_below(own: Any, limit: Any) -> Any:
    """The lower end of numbers that are at least `own` and at least `limit`; `limit` if that is undecided."""
    return own if at_most(limit, own) else limit


def join(intervals: Iterable[Interval]) -> Interval:
    """An interval that holds all of several intervals; single numbers outside of the others stay points."""
    every = list(intervals)
    wide = [i for i in every if not _is_point(i)] or every
    low, high = lower(i.low for i in wide), higher(i.high for i in wide)
    points = {p for i in every for p in (*i.points, *([int(i.low)] if _is_point(i) else ()))}
    outside = frozenset(p for p in points if not (at_most(low, p) and at_most(p, high)))
    same = len({(i.low, i.high) for i in every}) == 1
    return Interval(low, high, outside, exact=same and all(i.exact for i in every))


def _is_point(interval: Interval) -> bool:
    low = interval.low
    return interval.is_number and not _is_symbolic(low) and low not in (INFINITE, -INFINITE) and int(low) == low


def plus(a: Interval, b: Interval) -> Interval:
    """All sums."""
    shifted = a.points if _is_point(b) else frozenset[int]()
    a, b = a if shifted else a.whole(), b.whole()
    points = frozenset(p + int(b.low) for p in shifted)
    return Interval(_sum(a.low, b.low), _sum(a.high, b.high), points, a.exact and b.is_number and b.exact)


def _sum(a: Any, b: Any) -> Any:
    for end in (a, b):
        if end in (INFINITE, -INFINITE):
            return end
    return a + b


def minus(a: Interval) -> Interval:
    """All negated numbers."""
    return Interval(-a.high, -a.low, frozenset(-p for p in a.points), a.exact)


def times(a: Interval, b: Interval) -> Interval:
    """All products."""
    exact = a.exact and b.exact and (a.is_number or b.is_number)
    a, b = a.whole(), b.whole()
    corners = [_product(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if None in corners:
        return UNKNOWN
    return Interval(lower(corners), higher(corners), exact=exact)


def _product(a: Any, b: Any) -> Any:
    """The product of two ends; None if its sign is undecided and it is infinite."""
    if a == 0 or b == 0:
        return 0
    if INFINITE not in (abs(a), abs(b)):
        return a * b
    negative = [at_most(x, 0) for x in (a, b)]
    if not all(n or at_most(0, x) for n, x in zip(negative, (a, b), strict=True)):
        return None
    return -INFINITE if negative[0] != negative[1] else INFINITE


def quotient(a: Interval, b: Interval) -> Interval:
    """All quotients, without rounding; unknown unless the divisor is positive, and a single number or at least 1."""
    a, b = a.whole(), b.whole()
    if b.is_number and not _is_symbolic(b.low) and 0 < b.low < INFINITE:
        return Interval(_divided(a.low, b.low), _divided(a.high, b.low))
    if not at_most(1, b.low):
        return UNKNOWN
    low = _divided(a.low, b.low) if at_most(a.low, 0) else _divided(a.low, b.high)
    high = _divided(a.high, b.high) if at_most(a.high, 0) else _divided(a.high, b.low)
    decided = [at_most(x, 0) or at_most(0, x) for x in (a.low, a.high)]
    return Interval(low if decided[0] else -INFINITE, high if decided[1] else INFINITE)


def _divided(a: Any, b: Any) -> Any:
    if b == INFINITE:
        return 0
    if a in (INFINITE, -INFINITE):
        return a
    return sympy.sympify(a) / b if _is_symbolic(a) or _is_symbolic(b) else a / b


def remainder(a: Interval, b: Interval, *, like_divisor: bool, whole: bool) -> Interval:
    """All remainders.

    Args:
        a: the dividend.
        b: the divisor.
        like_divisor: whether a remainder has the sign of the divisor (`%`); otherwise it has that of the dividend.
        whole: whether all numbers are integers.
    """
    a, b = a.whole(), b.whole()
    if at_most(b.high, -1):
        mirrored = minus(a) if like_divisor else a
        found = remainder(mirrored, minus(b), like_divisor=like_divisor, whole=whole)
        return minus(found) if like_divisor else found
    if not at_most(1, b.low):
        return UNKNOWN
    top = _sum(b.high, -1 if whole else 0)  # a remainder of floats may be rounded up to the divisor
    if at_most(0, a.low):
        return Interval(0, a.high if at_most(a.high, top) else top)
    if like_divisor:
        return Interval(0, top)
    return Interval(-top, 0 if at_most(a.high, 0) else top)


def clamped(a: Interval, low: Any, high: Any) -> Interval:
    """`a` cut to numbers between `low` and `high`; an end that is None does not cut."""
    a = a.whole()
    if low is not None:
        a = Interval(cut_below(a.low, low), higher([a.high, low]) if a.high != INFINITE else INFINITE)
    if high is not None:
        least = lower([a.low, high]) if a.low != -INFINITE else -INFINITE
        a = Interval(least, cut_above(a.high, high))
    return a


def floored(a: Interval) -> Interval:
    """The integers below or at the numbers of `a`."""
    return Interval(_floor(a.low), _floor(a.high))


def raised(a: Interval) -> Interval:
    """The integers above or at the numbers of `a`."""
    return minus(floored(minus(a)))


def truncated(a: Interval) -> Interval:
    """The integers that numbers of `a` become without their fractions."""
    down, up = floored(a), raised(a)
    return Interval(up.low if at_most(a.low, 0) else down.low, down.high if at_most(0, a.high) else up.high)


def _floor(end: Any) -> Any:
    if end in (INFINITE, -INFINITE):
        return end
    return sympy.floor(end) if _is_symbolic(end) else math.floor(end)
