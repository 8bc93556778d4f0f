"""Places in one allocation for values that are live at different times."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

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


class _Few:
    """Spans with places, in a list, which is quickest to scan for hundreds of spans."""

    def __init__(self, count: int) -> None:
        self._placed: list[tuple[int, int, int, int]] = []  # (offset, end offset, first moment, last moment), sorted

    def add(self, offset: int, span: Span) -> None:
        """Place `span` at `offset`."""
        bisect.insort(self._placed, (offset, offset + span.bytes, span.start, span.end))

    def best_gap(self, span: Span) -> int:
        """The offset of the smallest gap between the spans that are live with `span`; behind all of them if none."""
        best, gap, free = None, math.inf, 0
        for lower, upper, first, last in self._placed:
            if last < span.start or first > span.end:
                continue
            if span.bytes <= lower - free < gap:
                best, gap = free, lower - free
            free = max(free, upper)
        return free if best is None else best


class _Many:
    """The same in arrays, for the thousands of spans of a long unrolled loop."""

    def __init__(self, count: int) -> None:
        self._placed = np.empty((4, count), np.int64)
        self._count = 0

    def add(self, offset: int, span: Span) -> None:
        """Place `span` at `offset`."""
        at, count = int(self._placed[0, : self._count].searchsorted(offset)), self._count
        self._placed[:, at + 1 : count + 1] = self._placed[:, at:count]
        self._placed[:, at] = offset, offset + span.bytes, span.start, span.end
        self._count += 1

    def best_gap(self, span: Span) -> int:
        """The offset of the smallest gap between the spans that are live with `span`; behind all of them if none."""
        lower, upper, first, last = self._placed[:, : self._count]
        live = np.flatnonzero((last >= span.start) & (first <= span.end))
        if not live.size:
            return 0
        free = np.maximum.accumulate(upper[live])  # up to where memory is taken behind each of them
        before = np.concatenate(([0], free[:-1]))
        gaps = lower[live] - before
        fits = np.flatnonzero(gaps >= span.bytes)
        return int(before[fits[gaps[fits].argmin()]] if fits.size else free[-1])


_FEW = 500  # from here on arrays are quicker


def _placed_in_order(spans: Sequence[Span], order: Sequence[int]) -> Placement:
    """Place `spans` in one order, each into the gap between earlier ones that fits it best."""
    offsets = [0] * len(spans)
    placed = _Few(len(spans)) if len(spans) < _FEW else _Many(len(spans))
    for index in order:
        offsets[index] = placed.best_gap(spans[index])
        placed.add(offsets[index], spans[index])
    ends = (offset + span.bytes for offset, span in zip(offsets, spans, strict=True))
    return Placement(tuple(offsets), max(ends, default=0))
