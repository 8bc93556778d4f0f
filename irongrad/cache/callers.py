"""Whose code is running: Python's own, an installed package's, or the user's."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

# The file name of importlib's own code.
IMPORTLIB = "<frozen importlib._bootstrap_external>"

_OURS = (__file__, str(Path(__file__).with_name("tracer.py")))


@cache
def _roots() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the directories of Python's own modules, and those of installed packages."""
    own = {sysconfig.get_path(n) + os.sep for n in ("stdlib", "platstdlib")}
    packages = {sysconfig.get_path(n) for n in ("purelib", "platlib")} | {*site.getsitepackages()}
    return tuple(own), tuple(p + os.sep for p in packages | {site.getusersitepackages()})


def is_installed(path: str) -> bool:
    """Return whether a path belongs to Python itself or to an installed package."""
    own, packages = _roots()
    return path.startswith(own) or path.startswith(packages)


def package(file: str) -> str:
    """Return the directory of the installed package that holds an extension module.

    For a file elsewhere it returns the file itself, and for Python's own modules an empty string.
    """
    own, packages = _roots()
    for root in packages:
        if file.startswith(root):
            return file.removeprefix(root).partition(os.sep)[0]
    return "" if file.startswith(own) else file


def _files_of_callers() -> Iterator[str]:
    """Yield the files of the running code, the innermost first, without the tracer's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _OURS:
            yield frame.f_code.co_filename
        frame = frame.f_back


def asker() -> str:
    """Return the file of the innermost code that is not Python's own; empty if there is none.

    Python's own modules act on behalf of that code.
    """
    own, packages = _roots()
    return next((f for f in _files_of_callers() if f.startswith(packages) or not f.startswith((*own, "<frozen"))), "")


def is_importing_a_package() -> bool:
    """Return whether the running code is part of the import of an installed package.

    During its import a package may look at the machine or draw example numbers. How it uses them is its own affair:
    only code that runs outside of such imports is the step's code.
    """
    its_code = False
    for file in _files_of_callers():
        if file == IMPORTLIB and its_code:
            return True
        its_code = its_code or is_installed(file)
        if not is_installed(file) and not file.startswith("<frozen"):
            return False
    return False
