"""Watch the calls that Python makes in this thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any


@contextmanager
def profiled(seen: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """While open, `seen` gets every event of `sys.setprofile` in this thread, and so does an outer `profiled`.

    Any other profiler gets none meanwhile.
    """
    outer = sys.getprofile()

    def seen_by_all(frame: FrameType, event: str, called: Any) -> None:
        seen(frame, event, called)
        if isinstance(outer, FunctionType):
            outer(frame, event, called)

    sys.setprofile(seen_by_all)
    try:
        yield
    finally:
        sys.setprofile(outer)
