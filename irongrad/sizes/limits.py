"""The sizes of named dimensions for which a program is valid, from the conditions that capture assumed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from irongrad.sizes.dimensions import holds

_TRIED = 1 << 12  # limits are searched up to this size
_FAR = 1 << 20  # a condition that holds here and at all sizes tried is taken to hold at every larger size


@dataclass(frozen=True)
class Limits:
    """The sizes that functions accept.

    Attributes:
        smallest: the smallest size of each named dimension.
        largest: the largest size of each named dimension that has one.
        conditions: further relations between named dimensions that must hold.
    """

    smallest: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()

    def interval(self, name: str) -> tuple[int, int | None]:
        """The smallest and the largest size of a dimension; the largest is None if there is no limit."""
        return self.smallest.get(name, 1), self.largest.get(name)

    def allow(self, sizes: Mapping[str, int]) -> bool:
        """Whether a call may have these sizes."""
        return (
            all(sizes[n] >= s for n, s in self.smallest.items())
            and all(sizes[n] <= s for n, s in self.largest.items())
            and all(holds(c, sizes) for c in self.conditions)
        )


def limits_up_to(
    conditions: Iterable[Any], largest: Mapping[str, int], declared: Sequence[Any] = (), unlimited: Sequence[str] = ()
) -> Limits:
    """As `limits_of`, for sizes up to `largest`; a condition that holds for all these sizes sets no limit.

    A condition on several large dimensions is tried only at some of their sizes. Conditions in `declared` always set
    limits. The dimensions in `unlimited` have no largest size.
    """
    names = [*largest, *unlimited]
    return limits_of([*(c for c in conditions if not _always(c, largest)), *declared], names)


def always_holds(condition: Any, limits: Limits) -> bool:
    """Whether a condition holds at all sizes within the intervals of `limits`.

    A condition on one dimension is tried at all sizes that limits are searched up to. One on several is tried at the
    smallest sizes of each, unless it is about remainders.
    """
    names = sorted(s.name for s in condition.free_symbols)
    if not names or (len(names) > 1 and condition.has(Mod, PythonMod)):
        return not names and bool(condition)
    ends = [limits.interval(name) for name in names]
    if len(names) == 1:
        found = _interval(condition, names[0])
        (least, most), (low, high) = ends[0], found if found is not None else (_FAR, 0)
        return low <= least and (high is None or (most is not None and most <= high))
    tried = [[n for n in (*range(least, least + 12), _FAR) if most is None or n <= most] for least, most in ends]
    return all(holds(condition, dict(zip(names, sizes, strict=True))) for sizes in itertools.product(*tried))


def _always(condition: Any, largest: Mapping[str, int]) -> bool:
    names = sorted(s.name for s in getattr(condition, "free_symbols", ()))
    if not set(names) <= largest.keys():
        return False
    every = math.prod(largest[n] for n in names) <= _TRIED
    if not every and isinstance(condition, sympy.Ne):
        return False  # a `!=` that holds at some sizes may fail at the others
    tried = [range(1, largest[n] + 1) if every or len(names) == 1 else sorted({1, 2, 3, largest[n]}) for n in names]
    return all(holds(condition, dict(zip(names, sizes, strict=True))) for sizes in itertools.product(*tried))


def limits_of(conditions: Iterable[Any], names: Sequence[str]) -> Limits:
    """The limits that `conditions` set; a condition that allows an interval of one dimension becomes its bounds."""
    smallest, largest = dict.fromkeys(names, 1), dict[str, int]()
    others: dict[Any, None] = {}
    for condition in _with_divisors(conditions):
        found = sorted(s.name for s in getattr(condition, "free_symbols", ()))
        if not found:
            continue
        interval = _interval(condition, found[0]) if len(found) == 1 else None
        if interval is None:
            others[condition] = None
            continue
        low, high = interval
        smallest[found[0]] = max(smallest[found[0]], low)
        if high is not None:
            largest[found[0]] = min(largest.get(found[0], high), high)
    return Limits(smallest, largest, tuple(others))


def _with_divisors(conditions: Iterable[Any]) -> Iterator[Any]:
    """The conditions. Before each that becomes no bounds: that it divides by no zero, which would end the process."""
    for condition in conditions:
        names = sorted(s.name for s in getattr(condition, "free_symbols", ()))
        if len(names) > 1 or (names and _interval(condition, names[0]) is None):
            divisors = {d.args[1] for d in condition.atoms(FloorDiv, Mod, PythonMod)}
            yield from (sympy.Ne(d, 0) for d in sorted(divisors, key=str) if not d.is_Integer)
        yield condition


@functools.cache  # sympy takes seconds for all sizes, and the programs of a step share conditions
def _interval(condition: Any, name: str) -> tuple[int, int | None] | None:
    """The first and the last size for which `condition` holds (None for no last); None if there are gaps."""
    right = [holds(condition, {name: s}) for s in (*range(1, _TRIED), _FAR)]
    if not any(right):
        return None
    first = right.index(True)
    last = len(right) - 1 - right[::-1].index(True)
    if not all(right[first : last + 1]):
        return None
    return first + 1, None if last == len(right) - 1 else last + 1


def multiple_of(condition: Any) -> tuple[Any, int] | None:
    """The size and the divisor if a condition says that the size is a multiple; None for other conditions."""
    if not isinstance(condition, sympy.Eq) or condition.rhs != 0 or not isinstance(condition.lhs, (Mod, PythonMod)):
        return None
    size, step = condition.lhs.args
    return (size, int(step)) if step.is_Integer else None


def spelled(condition: Any) -> str:
    """A condition in words that can follow "needs"."""
    found = multiple_of(condition)
    if found is not None:
        return f"{found[0]} a multiple of {found[1]}"
    return f"{condition.lhs} != {condition.rhs}" if isinstance(condition, sympy.Ne) else str(condition)
