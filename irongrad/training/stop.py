"""A request to stop training after the running step: by SIGTERM, or by the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM = "SIGTERM"


class Stop:
    """A request to stop; any thread and any callback may make it.

    Attributes:
        reason: why training shall stop; None if it shall not.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """Ask for a stop after the running step; the first reason counts."""
        if self.reason is None:
            self.reason = reason


@contextmanager
def on_sigterm(stop: Stop) -> Iterator[None]:
    """Turn SIGTERM into a request to stop; a second one ends the process at once, as it does elsewhere.

    A handler of the program's own stays. In other threads than the first this does nothing, because Python handles
    signals in the first.
    """
    first = threading.current_thread() is threading.main_thread()
    if not first or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        stop.request(SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
