"""The files that this process has open or mapped, as Linux lists them."""

from __future__ import annotations

import os
from contextlib import suppress


def name_of(number: int) -> str | None:
    """Return the path behind a file descriptor, which native code may have opened; None for a pipe or if unknown.

    Source: Linux's proc(5).
    """
    with suppress(OSError):
        name = os.readlink(f"/proc/self/fd/{number}")
        return name if name.startswith(os.sep) else None
    return None


def mapped_libraries() -> set[str]:
    """Return the libraries that this process has mapped; none where the system does not list them.

    Source: Linux's proc(5).
    """
    with suppress(OSError), open("/proc/self/maps") as maps:
        paths = (line.rstrip("\n").split(None, 5)[5:] for line in maps)
        return {path for found in paths for path in found if ".so" in os.path.basename(path)}
    return set()
