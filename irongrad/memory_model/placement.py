"""Where in one allocation values lie that are there at different times."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# On a CPU every value begins on a cache line, as IREE has it too (`min_buffer_offset_alignment`).
ALIGNMENT = 64


@dataclass(frozen=True)
class Span:
    """Memory that is taken for a time.

    Attributes:
        bytes: how much.
        start: the moment at which it is first written.
        end: the moment at which it is last read; nothing else may lie there then.
    """

    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Places in one allocation.

    Attributes:
        offsets: of each span, in bytes.
        total: the bytes of the allocation.
    """

    offsets: tuple[int, ...]
    total: int


def place(spans: Sequence[Span], alignment: int = ALIGNMENT) -> Placement:
    """Places for `spans` in as little memory as is found, each at a multiple of `alignment`.

    The largest are placed first, each into the smallest gap among those that are there at the same time (Pisarchyk and
    Lee, "Efficient Memory Management for Deep Neural Net Inference", arXiv:2001.03288, section 5). Where that takes
    more than is in memory at once, other orders are tried.
    """
    spans = [replace(span, bytes=aligned(span.bytes, alignment)) for span in spans]
    least = most_at_once(spans)
    best: Placement | None = None
    for order in _ORDERS:
        placed = _placed(spans, sorted(range(len(spans)), key=lambda i: order(spans[i])))
        if best is None or placed.total < best.total:
            best = placed
        if best.total == least:
            break
    assert best is not None
    return best


def most_at_once(spans: Sequence[Span]) -> int:
    """The most bytes that are taken at one moment, which no placement can do with less than."""
    change: dict[int, int] = {}
    for span in spans:
        change[span.start] = change.get(span.start, 0) + span.bytes
        change[span.end + 1] = change.get(span.end + 1, 0) - span.bytes
    now = most = 0
    for moment in sorted(change):
        now += change[moment]
        most = max(most, now)
    return most


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment` from `size` on."""
    return -(-size // alignment) * alignment


_ORDERS: tuple[Callable[[Span], tuple[int, ...]], ...] = (
    lambda s: (-s.bytes, s.start),
    lambda s: (-s.bytes * (s.end - s.start + 1), s.start),
    lambda s: (s.start - s.end, -s.bytes),
    lambda s: (s.start,),  # IREE 3.13.0's own (LayoutSlices.cpp)
)


def _placed(spans: Sequence[Span], order: Sequence[int]) -> Placement:
    """`spans` in one order, each at the place where it fits best between those before it."""
    offsets = [0] * len(spans)
    placed: list[tuple[int, int, int, int]] = []  # where each begins and ends, in memory and in time; by the first
    total = 0
    for index in order:
        span = spans[index]
        size, start, end = span.bytes, span.start, span.end
        best, gap, free = None, math.inf, 0
        for lower, upper, first, last in placed:
            if last < start or first > end:
                continue
            if size <= lower - free < gap:
                best, gap = free, lower - free
            free = max(free, upper)
        offset = offsets[index] = free if best is None else best
        bisect.insort(placed, (offset, offset + size, start, end))
        total = max(total, offset + size)
    return Placement(tuple(offsets), total)
