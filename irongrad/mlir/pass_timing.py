"""The time of each of IREE's passes, as MLIR reports it (`--mlir-timing`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FLAGS = ("--mlir-timing", "--mlir-timing-display=tree", "--mlir-output-format=json")

# Rows of MLIR's report that are no passes.
_SUMS = frozenset({"Rest", "Total"})
_SHORTEST = 1e-3


def without_timing(stderr: str) -> tuple[str, list[dict[str, Any]]]:
    """A tool's messages without MLIR's report, and the report: an empty one if there is none."""
    start = stderr.find("[\n{")
    if start < 0:
        return stderr, []
    try:
        report, length = json.JSONDecoder().raw_decode(stderr[start:])
    except json.JSONDecodeError:
        return stderr, []
    return stderr[:start] + stderr[start + length :].lstrip("\n"), report


def passes_in(
    report: Sequence[Mapping[str, Any]], start: float, seconds: float
) -> Iterator[tuple[str, float, float, float]]:
    """The passes of a report, one after the other from `start` on, with those inside a pass inside its time.

    MLIR sums up the times of a pass over all kernels, which it compiles at once. So a pass has its share of the time
    that the passes around it take by the clock.

    Yields:
        The name, the start, the time by the clock, and the sum over all threads, in seconds.
    """
    rows = [row for row in report if row.get("name") not in {*_SUMS, None}]
    sums = [max(0.0, float(row["wall"]["duration"])) for row in rows]
    scale = min(1.0, seconds / sum(sums)) if sum(sums) else 0.0
    for row, whole in zip(rows, sums, strict=True):
        taken = whole * scale
        if taken >= _SHORTEST:
            yield str(row["name"]), start, taken, whole
            yield from passes_in(row.get("passes", ()), start, taken)
        start += taken
