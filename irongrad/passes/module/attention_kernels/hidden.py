"""Scores that a constant mask hides: what they are computed into is zero, so a kernel leaves them out.

A score of minus infinity has the weight zero, whatever it was before the mask: its exponential is zero, and so is every
product with it. As in the kernels of PyTorch, a hidden score is taken for a finite number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from iree.compiler import ir

from irongrad.mlir.constants import Constants
from irongrad.mlir.linalg import producer_of
from irongrad.passes.module.attention_kernels.region import Input, Region
from irongrad.passes.module.attention_kernels.values import combiner_of

# What is known of a number. _ANY: it is not as large as what hides a score. _LEAST: it is minus infinity or nearly so.
# _ZERO: it is zero. _LARGE: it may be as large as what hides a score, and so may uncover one.
_ANY, _LEAST, _ZERO, _LARGE = 0, 1, 2, 3

# What is added to hide a score is at most this. Other scores are larger by far.
_HIDES = -1e30

_KEEPS = frozenset({"arith.extf", "arith.truncf"})

# Columns are left out in so many at once: whole vectors, and whole register tiles.
UNIT = 32

# The most columns that are computed, as a part of all, for which it is worth to leave out the others.
_WORTH = 0.9


def columns_seen(region: Region, constants: Constants) -> int | None:
    """How many columns of the first row count, if each row has at most one more than the row before it.

    None if (nearly) all columns of all rows count, or if a row has none.
    """
    sizes = region.sizes
    if sizes.columns % UNIT:
        return None
    states = _States(region, constants)
    unread = [states.of(reader.scores) == _ZERO for reader in region.readers]
    for number, reduction in region.reductions.items():
        neutral = {"arith.addf": _ZERO, "arith.maximumf": _LEAST}.get(combiner_of(reduction.operations[-1]))
        unread.append(states.of(region.parents(number)[0]) == neutral)
    # A row of which one softmax sees nothing is no row of zeros, even if another softmax sees some of it.
    if any(one.all(axis=1).any() for one in unread):
        return None
    hidden = np.logical_and.reduce(unread)
    counts = sizes.columns - hidden[:, ::-1].argmin(axis=1)
    rows = np.arange(sizes.rows)
    first = int((counts - rows).max())
    computed = np.minimum(rows + first, sizes.columns).mean()
    return first if computed <= _WORTH * sizes.columns else None


@dataclass(frozen=True)
class _States:
    """What is known of the elements of matrices."""

    region: Region
    constants: Constants
    known: dict[Any, np.ndarray] = field(default_factory=dict)

    def of(self, matrix: Any) -> np.ndarray:
        """What is known of each element of a matrix, (rows, columns), for the whole batch."""
        if matrix not in self.known:
            self.known[matrix] = self._computed(matrix)
        return self.known[matrix]

    def _computed(self, matrix: Any) -> np.ndarray:
        sizes = self.region.sizes
        unknown = np.full((sizes.rows, sizes.columns), _ANY)
        if matrix in self.region.products:
            return unknown
        block = matrix.owner.regions[0].blocks[0]
        states: dict[Any, np.ndarray] = {}
        values: dict[Any, np.ndarray] = {}
        for argument, one in zip(block.arguments, self.region.matrices[matrix], strict=False):
            if one.inside is not None and one.inside not in self.region.numbers:
                states[argument] = self.of(one.inside)
            elif (value := self._value(one, matrix)) is not None:
                values[argument] = value
        for op in (op.operation for op in block):
            if op.name == "linalg.yield":
                return np.broadcast_to(_state(op.operands[0], states, values), unknown.shape)
            given = [_state(o, states, values) for o in op.operands]
            states[op.results[0]] = _made(op, given, values)
        return unknown

    def _value(self, one: Input, matrix: Any) -> np.ndarray | None:
        """The value of a constant input, (rows, columns); None if it is not the same for the whole batch."""
        value = self.constants.value(one.value)
        rank = len(matrix.type.shape)
        if value is None or any(d < rank - 2 for d in one.loops):
            return None
        shape = [n if d in one.loops else 1 for d, n in enumerate(matrix.type.shape)]
        return value.reshape(shape[-2:])


def _state(value: Any, states: Mapping[Any, np.ndarray], values: Mapping[Any, np.ndarray]) -> Any:
    """What is known of a value in the body of an operation."""
    if value in states:
        return states[value]
    if value in values:
        number = values[value]
    elif producer_of(value) == "arith.constant" and isinstance(value.type, ir.FloatType):
        number = np.asarray(value.owner.attributes["value"].value)
    else:
        return np.asarray(_ANY)
    if number.dtype == bool:
        return np.asarray(_ANY)
    is_large = ~(np.abs(number) < -_HIDES)
    return np.select([number == 0, number <= _HIDES, is_large], [_ZERO, _LEAST, _LARGE], _ANY)


def _made(operation: Any, given: list[Any], values: Mapping[Any, np.ndarray]) -> Any:
    """What is known of the result of an operation on numbers."""
    name, operands = operation.name, list(operation.operands)
    if name == "arith.select" and operands[0] in values:
        return np.where(values[operands[0]], *given[1:])
    if name in _KEEPS:
        return given[0]
    hides = [state == _LEAST for state in given]
    is_large = reduce(np.logical_or, [np.isin(state, (_LEAST, _LARGE)) for state in given], np.asarray(False))
    unknown = np.where(is_large, _LARGE, _ANY)
    if name == "arith.select":
        return np.where(given[1] == given[2], given[1], unknown)
    if name == "arith.addf":
        uncovers = (given[0] == _LARGE) | (given[1] == _LARGE)
        return np.where((hides[0] | hides[1]) & ~uncovers, _LEAST, unknown)
    if name == "arith.subf":
        # Two equal numbers of -1e30 are zero apart.
        return np.where(hides[0] & ~hides[1] & (given[1] != _LARGE), _LEAST, unknown)
    if name == "math.exp":
        return np.where(hides[0], _ZERO, unknown)
    if name == "arith.mulf":
        # Zero times minus infinity is nan.
        return np.where(((given[0] == _ZERO) | (given[1] == _ZERO)) & ~is_large, _ZERO, unknown)
    if name == "arith.divf":
        return np.where(given[0] == _ZERO, _ZERO, unknown)
    return unknown
