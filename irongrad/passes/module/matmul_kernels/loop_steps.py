"""Which row of a stack an iteration of a loop reads or writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from irongrad.mlir.any_size import origin_of
from irongrad.mlir.walk import constant_of

_SIGNS = {"arith.addi": 1, "arith.subi": -1}


@dataclass(frozen=True)
class Step:
    """The row of a stack that an iteration reads or writes: `first + trips * of_trips + sign * iteration`.

    Of a known number of iterations, `of_trips` is zero.
    """

    first: int
    sign: int
    of_trips: int = 0


# What a loop of any number of iterations may do with a stack: go through it from either end.
FROM_AN_END = Step(0, 1), Step(-1, -1, 1)


def step_of(index: Any, loop: Any) -> Step | None:
    """The row `index` of a stack; None if it is not the first or last of some rows, up or down from there."""
    terms = _terms(index, loop)
    if terms is None or terms.iterations not in (1, -1) or terms.trips not in (0, 1):
        return None
    return Step(terms.number, terms.iterations, terms.trips)


class _Terms(NamedTuple):
    """A sum of a number, of multiples of the iteration and of the number of iterations."""

    number: int = 0
    iterations: int = 0
    trips: int = 0


def _terms(index: Any, loop: Any) -> _Terms | None:
    """An index as such a sum; None if it is none."""
    if index == loop.regions[0].blocks[0].arguments[0]:
        return _Terms(iterations=1)
    if (constant := constant_of(index)) is not None:
        return _Terms(constant)
    if origin_of(index) == origin_of(loop.operands[1]):
        return _Terms(trips=1)
    name = getattr(index.owner, "name", "")
    if name == "arith.index_cast":
        return _terms(index.owner.operands[0], loop)
    if name not in _SIGNS:
        return None
    left, right = (_terms(value, loop) for value in index.owner.operands)
    if left is None or right is None:
        return None
    return _Terms(*(a + _SIGNS[name] * b for a, b in zip(left, right, strict=True)))
