"""Temporary directories, which are removed even if the process that made them was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from irongrad.runtime.abandoned import hold, remove_abandoned, unique

_SUFFIX = ".scratch"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a new directory for temporary files, and remove it afterwards; remove those of killed processes too."""
    common = Path(tempfile.gettempdir()) / "irongrad"
    remove_abandoned(common, _SUFFIX)
    path, handle = made_and_held(common, _SUFFIX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def is_scratch(path: str) -> bool:
    """Return whether a path belongs to a scratch directory, of this process or of another."""
    return f"{os.sep}.irongrad." in path and _SUFFIX in path


def made_and_held(beside: Path, suffix: str) -> tuple[Path, int]:
    """Make a directory `.NAME.*SUFFIX` beside a path, and hold its lock; return it and its file descriptor.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = beside.with_name(f".{beside.name}.{unique()}{suffix}")
        path.mkdir()
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process took it for abandoned, before its lock was held
        if hold(handle, path):
            return path, handle
        os.close(handle)
