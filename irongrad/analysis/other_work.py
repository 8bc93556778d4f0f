"""How much of this machine's CPUs other processes take while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Of the CPUs' time: from here on, a measurement says how busy the machine was.
_WORTH_SAYING = 0.05

# The columns of /proc/stat that are idle time (proc(5)): `idle` and `iowait`. `guest` and `guest_nice` count twice.
_IDLE, _COUNTED = (3, 4), 8


class OtherWork:
    """The time that other processes, and other virtual machines, take of the CPUs from now on.

    The children of this process count as its own once they have ended.
    """

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """The share of all CPUs' time, from 0 to 1; None if the operating system does not tell."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        whole = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, others / whole))


def said(share: float | None) -> str:
    """What to say beside a measurement; empty if the machine was quiet, or if that is unknown."""
    if share is None or share < _WORTH_SAYING:
        return ""
    return f"other work took {share:.0%} of the CPUs meanwhile"


def _busy_seconds() -> float | None:
    try:
        first, _, _ = Path("/proc/stat").read_text().partition("\n")
    except OSError:
        return None
    ticks = [int(field) for field in first.split()[1 : 1 + _COUNTED]]
    return sum(n for column, n in enumerate(ticks) if column not in _IDLE) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
