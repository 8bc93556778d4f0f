"""The interface of a portable module, from which every target is compiled."""

from __future__ import annotations

from typing import Protocol

from irongrad.runtime.manifest import EntryPoint


class PortableModule(Protocol):
    """A whole program for IREE, such as an `AssembledModule`."""

    @property
    def bytecode(self) -> bytes:
        """The module as MLIR bytecode."""
        ...

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """Its exported functions."""
        ...
