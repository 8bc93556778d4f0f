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
    with held_directory(Path(tempfile.gettempdir()) / "irongrad", _SUFFIX) as path:
        yield path


@contextmanager
def held_directory(beside: Path, suffix: str) -> Iterator[Path]:
    """Yield a new directory `.NAME.*SUFFIX` beside a path, and remove it afterwards; remove those of killed processes.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(beside, suffix)
    path, handle = _made_and_held(beside, suffix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def is_scratch(path: str) -> bool:
    """Return whether a path belongs to a scratch directory, of this process or of another."""
    return f"{os.sep}.irongrad." in path and _SUFFIX in path


def _made_and_held(beside: Path, suffix: str) -> tuple[Path, int]:
    """Make such a directory, and hold its lock; return it and its file descriptor."""
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
