"""Watch the calls that Python makes in this thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def profiled(seen: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """While open, `seen` gets every event of `sys.setprofile` in this thread, in place of an outer profiler."""
    outer = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(outer)
