"""The memory of a function over its schedule: what is live at each moment, and what at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from irongrad.analysis.records import Analysis, Buffer, Source, Timeline

FORWARD, KEPT, RECOMPUTED, BACKWARD = "forward", "kept for the backward", "recomputed", "backward"


@dataclass(frozen=True)
class LiveBuffer:
    """A value that is in memory at the peak.

    Attributes:
        name: its name in the dumped graph.
        kind: why it is in memory: its phase, `kept for the backward`, or `recomputed`.
        source: where it comes from.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        nbytes: the size of its buffer, with padding.
        start: the first moment at which it is live.
        end: the last moment at which it is live.
    """

    name: str
    kind: str
    source: Source
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class MemoryOverTime:
    """The memory of one function of the step graph.

    Attributes:
        function: the function.
        peak: the largest sum of live bytes.
        allocated: the bytes that the plan allocates.
        moment: the moment of the peak.
        kernels: the values that are computed at each moment.
        live: the live bytes at each moment, by kind.
        alive: what is in memory at the peak, the largest first.
    """

    function: str
    peak: int
    allocated: int
    moment: int
    kernels: tuple[tuple[str, ...], ...]
    live: dict[str, tuple[int, ...]]
    alive: tuple[LiveBuffer, ...]


def memory_over_time(analysis: Analysis, timeline: Timeline) -> MemoryOverTime:
    """Sum up what is live at each moment of `timeline`."""
    moments = len(timeline.kernels)
    backward = min((b.start for b in timeline.buffers if _phase(analysis, b) == BACKWARD), default=moments)
    kinds = [_kind(analysis, buffer, backward) for buffer in timeline.buffers]
    live = {kind: _live(_of_kind(timeline.buffers, kinds, kind), moments) for kind in dict.fromkeys(kinds)}
    sums = [sum(at) for at in zip(*live.values(), strict=True)]
    moment = sums.index(max(sums)) if sums else 0
    alive = [
        LiveBuffer(b.name, kind, analysis.sources[b.source], b.dtype, b.shape, b.bytes, b.start, b.end)
        for b, kind in zip(timeline.buffers, kinds, strict=True)
        if b.start <= moment <= b.end and b.bytes
    ]
    return MemoryOverTime(
        timeline.function,
        timeline.peak,
        timeline.allocated,
        moment,
        timeline.kernels,
        live,
        tuple(sorted(alive, key=lambda b: b.nbytes, reverse=True)),
    )


def _phase(analysis: Analysis, buffer: Buffer) -> str:
    return analysis.sources[buffer.source].phase


def _kind(analysis: Analysis, buffer: Buffer, backward: int) -> str:
    """Why a value is in memory; `backward` is the first moment of the backward."""
    if buffer.recomputed:
        return RECOMPUTED
    phase = _phase(analysis, buffer)
    return KEPT if phase == FORWARD and buffer.start < backward <= buffer.end else phase


def _of_kind(buffers: Sequence[Buffer], kinds: Sequence[str], kind: str) -> list[Buffer]:
    return [buffer for buffer, its in zip(buffers, kinds, strict=True) if its == kind]


def _live(buffers: Sequence[Buffer], moments: int) -> tuple[int, ...]:
    changes: dict[int, int] = defaultdict(int)
    for buffer in buffers:
        changes[buffer.start] += buffer.bytes
        changes[buffer.end + 1] -= buffer.bytes
    return tuple(accumulate(changes[moment] for moment in range(moments)))
