"""Transposing a square of numbers in vector registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iree.compiler.dialects import vector


def transposed(rows: Sequence[Any]) -> list[Any]:
    """Transpose as many vectors as each has elements, a power of two.

    In the round with distance d, blocks of d by d elements change places across the diagonal.
    """
    width, vectors, distance = len(rows), list(rows), 1
    while distance < width:
        lower = [i for i in range(width) if not i & distance]
        for i in lower:
            one, other = vectors[i], vectors[i + distance]
            vectors[i] = vector.shuffle(one, other, [_of(j, distance, first=True, width=width) for j in range(width)])
            vectors[i + distance] = vector.shuffle(
                one, other, [_of(j, distance, first=False, width=width) for j in range(width)]
            )
        distance *= 2
    return vectors


def _of(place: int, distance: int, *, first: bool, width: int) -> int:
    """The element, among those of two vectors, that comes to `place` of the first or of the second one."""
    if first:
        return place + width - distance if place & distance else place
    return place + width if place & distance else place + distance
