"""Traces for ui.perfetto.dev, in the Trace Event Format of Chromium (JSON), which Perfetto reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from irongrad.analysis.timeline import Slice
from irongrad.reports.profile import Profile, Span
from irongrad.runtime.atomic_files import atomic_write

_MICRO = 1e6


def write_trace(slices: Iterable[Slice], path: Path, title: str) -> None:
    """Write a trace, whole or not at all; `title` is the name of its process."""
    slices = list(slices)
    tracks = {name: number for number, name in enumerate(dict.fromkeys(s.track for s in slices), start=1)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}]
    for name, number in tracks.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}})
    events += [
        {
            "ph": "X",
            "name": s.name,
            "cat": s.track,
            "pid": 1,
            "tid": tracks[s.track],
            "ts": s.start * _MICRO,
            "dur": s.seconds * _MICRO,
            "args": s.about,
        }
        for s in slices
    ]
    atomic_write(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False).encode())


def slices_of(profile: Profile) -> list[Slice]:
    """The kernels of a profile's step, with the modules and phases that they belong to on tracks above them."""
    lanes = _lanes(profile.spans)
    found = [
        Slice(s.kernel, f"kernels {lane}", s.start, s.seconds, {"module": s.module, "line": s.line, "phase": s.phase})
        for s, lane in zip(profile.spans, lanes, strict=True)
    ]
    return [*_runs(profile.spans, "phase"), *_runs(profile.spans, "module"), *found]


def _lanes(spans: Sequence[Span]) -> list[int]:
    """A number for each launch, so that launches with one number do not overlap."""
    ends: list[float] = []
    lanes = []
    for span in spans:
        free = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
        ends[free : free + 1] = [span.start + span.seconds]
        lanes.append(free + 1)
    return lanes


def _runs(spans: Sequence[Span], what: str) -> list[Slice]:
    """One slice for each run of consecutive launches with one module or phase."""
    found: list[Slice] = []
    for span in spans:
        name = getattr(span, what) or "other"
        end = span.start + span.seconds
        if found and found[-1].name == name:
            last = found.pop()
            found.append(Slice(name, what, last.start, max(last.start + last.seconds, end) - last.start))
        else:
            start = max(span.start, found[-1].start + found[-1].seconds) if found else span.start
            found.append(Slice(name, what, start, max(0.0, end - start)))
    return found
