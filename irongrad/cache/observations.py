"""Observations of the file system as text, which tell later whether a process would see the same.

An observation is the answer to a question about a path. A recorded compile stays valid while all its questions have the
same answers (`recordings.py`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from enum import StrEnum

ABSENT = "absent"
# The path is neither a file, a directory nor a link, but a device or a pipe.
SPECIAL = "special"

# Beside modules, Python looks up the metadata of installed packages in the directories of its path.
_METADATA = (".dist-info", ".egg-info")


class Question(StrEnum):
    """A question about a path."""

    CONTENT = "content"
    INSTALLED = "installed"
    STATUS = "status"
    KIND = "kind"
    LISTING = "listing"


def content(path: str) -> str:
    """Return the sha256 of a file, or a word for a path that is not a readable file, such as `ABSENT`."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            return SPECIAL if not stat.S_ISDIR(mode) else "directory"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return f"error {error.errno}"


def installed(path: str) -> str:
    """Return the state of a file or directory that a package manager writes, as git's index detects changed files.

    The inode and its change time cannot be set back (git's Documentation/technical/racy-git.txt; core.trustctime in
    git-config). git needs another rule for a file that is written twice within one tick of the clock. That does not
    happen to installed files after they were imported.
    """
    try:
        status = os.stat(path)
    except OSError:
        return ABSENT
    return f"{status.st_mode} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def kind(path: str) -> str:
    """Return the type and permissions of a path, and the target of a link."""
    try:
        link = os.readlink(path) if os.path.islink(path) else ""
        return f"{os.stat(path).st_mode} {link}"
    except OSError:
        return f"{ABSENT} {os.path.lexists(path)}"


def status(path: str) -> str:
    """Return what a program can learn of a path without opening it; for a directory, only its kind."""
    try:
        found = os.stat(path)
    except OSError:
        return kind(path)
    about = "" if stat.S_ISDIR(found.st_mode) else f"{found.st_size} {found.st_mtime_ns}"
    return f"{kind(path)} {about}"


def listing(path: str) -> str:
    """Return a hash of the names in a directory, with the status of each."""
    found = names_in(path)
    if found is None:
        return ABSENT
    entries = [(name, status(os.path.join(path, name))) for name in sorted(found)]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


ANSWERS: dict[Question, Callable[[str], str]] = {
    Question.CONTENT: content,
    Question.INSTALLED: installed,
    Question.STATUS: status,
    Question.KIND: kind,
    Question.LISTING: listing,
}


def names_in(directory: str) -> tuple[str, ...] | None:
    """Return the names in a directory, or None if there is no such directory."""
    try:
        return tuple(os.listdir(directory))
    except OSError:
        return None


def importable(found: Iterable[str] | None, modules: Iterable[str]) -> tuple[str, ...] | None:
    """Return the names of `found` that an import of one of `modules` may find: `x.py`, `x.so`, `x/`, ….

    `found` holds the names in a directory. The metadata of installed packages is kept as well.
    """
    if found is None:
        return None
    return tuple(sorted(n for n in found if n.partition(".")[0] in modules or n.endswith(_METADATA)))
