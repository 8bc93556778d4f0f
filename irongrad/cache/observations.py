"""What a process can see of the file system, as text that tells later whether it would see the same.

An observation is the answer to a question about a path. Asking again and comparing is all that a recorded compile is
checked by (`recordings.py`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from enum import StrEnum

ABSENT = "absent"
# What is no file, directory or link: a device, a pipe.
SPECIAL = "special"

# Beside modules, what Python looks for in the directories of its path: the descriptions of installed packages.
_METADATA = (".dist-info", ".egg-info")


class Question(StrEnum):
    """What is asked about a path."""

    CONTENT = "content"
    INSTALLED = "installed"
    STATUS = "status"
    KIND = "kind"
    LISTING = "listing"


def content(path: str) -> str:
    """The sha256 of a file; `ABSENT`, or what else it is."""
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
    """The state of a file or directory that a package manager writes, as git's index tells whether a file changed.

    The inode and the time of its change cannot be set back (git's Documentation/technical/racy-git.txt; core.trustctime
    in git-config). That a file is written twice within one tick of the clock, which needs another rule there, is
    nothing that happens to installed files after they were imported.
    """
    try:
        status = os.stat(path)
    except OSError:
        return ABSENT
    return f"{status.st_mode} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def kind(path: str) -> str:
    """Whether a path is a file, a directory or a link, to what, and with which permissions."""
    try:
        link = os.readlink(path) if os.path.islink(path) else ""
        return f"{os.stat(path).st_mode} {link}"
    except OSError:
        return f"{ABSENT} {os.path.lexists(path)}"


def status(path: str) -> str:
    """What a program can learn of a path without opening it; of a directory, its kind."""
    try:
        found = os.stat(path)
    except OSError:
        return kind(path)
    about = "" if stat.S_ISDIR(found.st_mode) else f"{found.st_size} {found.st_mtime_ns}"
    return f"{kind(path)} {about}"


def listing(path: str) -> str:
    """The names in a directory, with the status of each."""
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
    """The names in a directory; None where there is none."""
    try:
        return tuple(os.listdir(directory))
    except OSError:
        return None


def importable(found: Iterable[str] | None, modules: Iterable[str]) -> tuple[str, ...] | None:
    """Those of the names `found` in a directory that importing one of `modules` may find: `x.py`, `x.so`, `x/`, …"""
    if found is None:
        return None
    return tuple(sorted(n for n in found if n.partition(".")[0] in modules or n.endswith(_METADATA)))
