"""The modules that Python has loaded, read without running code of theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def module_globals() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the globals of every loaded module.

    `sys.modules` also holds objects that only look like modules. A lazy module loads itself when an attribute is read.
    The libraries of cffi say that their class is a module's, and have no globals.
    """
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType):
            yield name, object.__getattribute__(module, "__dict__")
