"""For which sizes of its named dimensions a program is right, from what capture took for true of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.utils._sympy.functions import Mod, PythonMod

from irongrad.sizes.dimensions import holds

_TRIED = 1 << 12  # a limit is looked for up to this size
_FAR = 1 << 20  # a condition that holds here and for all sizes tried holds for every larger one


@dataclass(frozen=True)
class Limits:
    """The sizes that functions take.

    Attributes:
        smallest: of each named dimension.
        largest: of those that have one.
        conditions: what else has to hold, relations of named dimensions.
    """

    smallest: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()

    def interval(self, name: str) -> tuple[int, int | None]:
        """The smallest and the largest size of a dimension; None for no largest."""
        return self.smallest.get(name, 1), self.largest.get(name)

    def allow(self, sizes: Mapping[str, int]) -> bool:
        """Whether a call may have these sizes."""
        return (
            all(sizes[n] >= s for n, s in self.smallest.items())
            and all(sizes[n] <= s for n, s in self.largest.items())
            and all(holds(c, sizes) for c in self.conditions)
        )


def limits_up_to(conditions: Iterable[Any], largest: Mapping[str, int], declared: Sequence[Any] = ()) -> Limits:
    """As `limits_of`, for sizes up to `largest`: a condition that holds for all of these sets no limit.

    One on several dimensions that are large is tried at some of their sizes.
    """
    return limits_of([*(c for c in conditions if not _always(c, largest)), *declared], list(largest))


def _always(condition: Any, largest: Mapping[str, int]) -> bool:
    names = sorted(s.name for s in getattr(condition, "free_symbols", ()))
    every = math.prod(largest[n] for n in names) <= _TRIED
    if not every and isinstance(condition, sympy.Ne):
        return False  # some sizes say nothing of the others
    tried = [range(1, largest[n] + 1) if every or len(names) == 1 else sorted({1, 2, 3, largest[n]}) for n in names]
    return all(holds(condition, dict(zip(names, sizes, strict=True))) for sizes in itertools.product(*tried))


def limits_of(conditions: Iterable[Any], names: Sequence[str]) -> Limits:
    """The limits that `conditions`, relations of named dimensions, set: an interval for each where there is one."""
    smallest, largest = dict.fromkeys(names, 1), dict[str, int]()
    others: dict[Any, None] = {}
    for condition in conditions:
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


@functools.cache  # sympy takes seconds over all sizes, and the programs of a step have conditions in common
def _interval(condition: Any, name: str) -> tuple[int, int | None] | None:
    """The first size for which `condition` holds and the last, None for no last; None where there are gaps."""
    right = [holds(condition, {name: s}) for s in (*range(1, _TRIED), _FAR)]
    if not any(right):
        return None
    first = right.index(True)
    last = len(right) - 1 - right[::-1].index(True)
    if not all(right[first : last + 1]):
        return None
    return first + 1, None if last == len(right) - 1 else last + 1


def multiple_of(condition: Any) -> tuple[Any, int] | None:
    """The size and the number of which a condition says that it is a multiple; None for one that says other things."""
    if not isinstance(condition, sympy.Eq) or condition.rhs != 0 or not isinstance(condition.lhs, (Mod, PythonMod)):
        return None
    size, step = condition.lhs.args
    return (size, int(step)) if step.is_Integer else None


def spelled(condition: Any) -> str:
    """A condition in words, to stand after "needs"."""
    found = multiple_of(condition)
    if found is not None:
        return f"{found[0]} a multiple of {found[1]}"
    return f"{condition.lhs} != {condition.rhs}" if isinstance(condition, sympy.Ne) else str(condition)
