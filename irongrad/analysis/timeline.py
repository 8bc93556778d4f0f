"""What runs when: spans of time that code notes while somebody records them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slice:
    """A span of time on a track.

    Attributes:
        name: what runs.
        track: the name of the track; slices of one track do not overlap, or lie one inside the other.
        start: seconds since the trace began.
        seconds: how long it runs.
        about: what a trace shows of it when it is selected.
    """

    name: str
    track: str
    start: float
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Timeline:
    """The slices that were noted since it began, from any thread."""

    slices: list[Slice] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def note(self, name: str, start: float, seconds: float, about: dict[str, Any]) -> None:
        """Note what ran in the current thread from `start`, a time of `time.perf_counter`."""
        self.slices.append(Slice(name, threading.current_thread().name, start - self.began, seconds, about))


# Compilers run one at a time in a process, and their work is in many threads and rooms, so there is one for all.
_recording: list[Timeline] = []


@contextmanager
def recorded() -> Iterator[Timeline]:
    """While open, slices are noted in the timeline that it yields."""
    timeline = Timeline()
    _recording.append(timeline)
    try:
        yield timeline
    finally:
        _recording.remove(timeline)


def recording() -> Timeline | None:
    """The timeline that is recorded now; None if there is none."""
    return _recording[-1] if _recording else None


@contextmanager
def noted(name: str, **about: Any) -> Iterator[None]:
    """Note the time that the block takes, if somebody records."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if (timeline := recording()) is not None:
            timeline.note(name, start, time.perf_counter() - start, about)
