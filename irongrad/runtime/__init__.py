"""Load and run compiled artifacts; needs numpy and the IREE runtime, not torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irongrad.runtime.function import CompiledFunction, load_function
    from irongrad.runtime.session import Session, load

__all__ = ["CompiledFunction", "Session", "load", "load_function"]

# Imported on first use: code that needs only an error class or a manifest does not load IREE.
_HOME = {"CompiledFunction": "function", "Session": "session", "load": "session", "load_function": "function"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irongrad.runtime' has no attribute {name!r}")
    return getattr(import_module(f"irongrad.runtime.{_HOME[name]}"), name)
