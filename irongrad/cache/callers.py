"""Whose code it is that does something: Python's own, an installed package's, or the user's."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

# What the code of importlib says of its file.
IMPORTLIB = "<frozen importlib._bootstrap_external>"

_OURS = (__file__, str(Path(__file__).with_name("tracer.py")))


@cache
def _roots() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where Python's own modules are, and where installed packages."""
    own = {sysconfig.get_path(n) + os.sep for n in ("stdlib", "platstdlib")}
    packages = {sysconfig.get_path(n) for n in ("purelib", "platlib")} | {*site.getsitepackages()}
    return tuple(own), tuple(p + os.sep for p in packages | {site.getusersitepackages()})


def is_installed(path: str) -> bool:
    """Whether a path is Python's own or an installed package's."""
    own, packages = _roots()
    return path.startswith(own) or path.startswith(packages)


def package(file: str) -> str:
    """The directory of installed packages that an extension module is in; its file, elsewhere."""
    own, packages = _roots()
    for root in packages:
        if file.startswith(root):
            return file.removeprefix(root).partition(os.sep)[0]
    return "" if file.startswith(own) else file


def _files_of_callers() -> Iterator[str]:
    """The files of the code that is running, the innermost first, without the tracer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _OURS:
            yield frame.f_code.co_filename
        frame = frame.f_back


def asker() -> str:
    """The file of the code for which Python's own modules do something."""
    own, packages = _roots()
    return next((f for f in _files_of_callers() if f.startswith(packages) or not f.startswith((*own, "<frozen"))), "")


def is_importing_a_package() -> bool:
    """Whether what happens is part of the import of an installed package: it looks at the machine, or draws examples.

    What it makes of that is its own affair; the step's code is what runs outside of it.
    """
    its_code = False
    for file in _files_of_callers():
        if file == IMPORTLIB and its_code:
            return True
        its_code = its_code or is_installed(file)
        if not is_installed(file) and not file.startswith("<frozen"):
            return False
    return False
