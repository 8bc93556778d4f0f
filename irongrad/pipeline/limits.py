"""For which sizes of its named dimensions a program is right, from what capture took for true of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.utils._sympy.functions import Mod, PythonMod

from irongrad.padding.sizes import symbol
from irongrad.pipeline.dimensions import is_of_broadcasting

_TRIED = 1 << 12  # a limit is looked for up to this size
_FAR = 1 << 20  # a condition that holds here and for all sizes tried holds for every larger one


@dataclass(frozen=True)
class Limits:
    """The sizes that functions of any size take.

    Attributes:
        smallest: of each named dimension.
        largest: of those that have one.
        conditions: what else has to hold, relations of named dimensions.
    """

    smallest: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()

    def allow(self, sizes: Mapping[str, int]) -> bool:
        """Whether a call may have these sizes."""
        values = {symbol(n): sympy.Integer(s) for n, s in sizes.items()}
        return (
            all(sizes[n] >= s for n, s in self.smallest.items())
            and all(sizes[n] <= s for n, s in self.largest.items())
            and all(bool(c.xreplace(values)) for c in self.conditions)
        )


def limits_of(conditions: Iterable[Any], names: Sequence[str]) -> Limits:
    """The limits that `conditions`, relations of named dimensions, set: an interval for each where there is one."""
    smallest, largest = dict.fromkeys(names, 1), dict[str, int]()
    others: dict[Any, None] = {}
    for condition in conditions:
        found = sorted(s.name for s in getattr(condition, "free_symbols", ()))
        if not found or is_of_broadcasting(condition):
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


def _interval(condition: Any, name: str) -> tuple[int, int | None] | None:
    """The first size for which `condition` holds and the last, None for no last; None where there are gaps."""
    holds = [bool(condition.xreplace({symbol(name): sympy.Integer(s)})) for s in (*range(1, _TRIED), _FAR)]
    if not any(holds):
        return None
    first = holds.index(True)
    last = len(holds) - 1 - holds[::-1].index(True)
    if not all(holds[first : last + 1]):
        return None
    return first + 1, None if last == len(holds) - 1 else last + 1


def spelled(condition: Any) -> str:
    """A condition in words, to stand after "must have"."""
    if isinstance(condition, sympy.Eq) and isinstance(condition.lhs, (Mod, PythonMod)) and condition.rhs == 0:
        size, step = condition.lhs.args
        return f"{size} a multiple of {step}"
    return str(condition)
