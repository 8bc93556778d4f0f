"""Places in one allocation for values that are live at different times."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# In bytes. On a CPU every value begins on a cache line, as in IREE (`min_buffer_offset_alignment`).
ALIGNMENT = 64


@dataclass(frozen=True)
class Span:
    """A number of bytes with a live range.

    Attributes:
        bytes: the size.
        start: the moment of the first write.
        end: the moment of the last read. The bytes are reused only after it.
    """

    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Places in one allocation.

    Attributes:
        offsets: the offset of each span, in bytes.
        total: the size of the allocation, in bytes.
    """

    offsets: tuple[int, ...]
    total: int


def place(spans: Sequence[Span], alignment: int = ALIGNMENT) -> Placement:
    """Place `spans` in one allocation, as small as several orders find it, each at a multiple of `alignment`.

    The largest spans are placed first. Each goes into the smallest gap between spans that are live at the same time
    (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", arXiv:2001.03288, section 5). If
    the allocation is larger than the peak of live bytes, other orders are tried.
    """
    spans = [replace(span, bytes=aligned(span.bytes, alignment)) for span in spans]
    least = most_at_once(spans)
    best: Placement | None = None
    for order in _ORDERS:
        placed = _placed_in_order(spans, sorted(range(len(spans)), key=lambda i: order(spans[i])))
        if best is None or placed.total < best.total:
            best = placed
        if best.total == least:
            break
    assert best is not None
    return best


def most_at_once(spans: Sequence[Span]) -> int:
    """The peak of live bytes, which is a lower bound on every placement."""
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
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


_ORDERS: tuple[Callable[[Span], tuple[int, ...]], ...] = (
    lambda s: (-s.bytes, s.start),
    lambda s: (-s.bytes * (s.end - s.start + 1), s.start),
    lambda s: (s.start - s.end, -s.bytes),
    lambda s: (s.start,),  # the order of IREE 3.13.0 (LayoutSlices.cpp)
)


def _placed_in_order(spans: Sequence[Span], order: Sequence[int]) -> Placement:
    """Place `spans` in one order, each into the gap between earlier ones that fits it best."""
    offsets = [0] * len(spans)
    placed: list[tuple[int, int, int, int]] = []  # (offset, end offset, first moment, last moment), sorted
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
