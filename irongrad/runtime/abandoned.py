"""Tell the temporary files and directories of living writers from those that killed writers left.

A writer holds the lock (flock(2)) of what it writes. The system releases the lock when the process ends, however it
ends. On Windows nothing is locked, and nothing is removed.
"""

from __future__ import annotations

import glob
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def unique() -> str:
    """Return a part of a name that no other process or thread makes; without random numbers, which a build may draw."""
    return f"{os.getpid():x}-{threading.get_ident():x}-{time.monotonic_ns():x}"


def hold(handle: int, path: Path) -> bool:
    """Take the lock of the temporary `path`, which this process just made; return False if it was removed before that.

    Args:
        handle: an open file descriptor of `path`; the lock lasts until it is closed.
        path: the file or directory.
    """
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


def remove_abandoned(path: Path, suffix: str, keep: Path | None = None) -> None:
    """Remove the temporaries beside `path`, `.NAME.*SUFFIX`, whose writers have ended; all but `keep`."""
    if fcntl is None:
        return
    for found in path.parent.glob(f".{glob.escape(path.name)}.*{suffix}"):
        if found == keep:
            continue
        with suppress(OSError):
            handle = os.open(found, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if the writer lives
                if found.is_dir():
                    shutil.rmtree(found, ignore_errors=True)
                else:
                    os.unlink(found)
            finally:
                os.close(handle)
