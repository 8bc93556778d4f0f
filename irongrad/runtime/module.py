"""What a session runs: one module on a device, or the modules of a step's parts on devices of their own."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any, Protocol

import iree.runtime as ireert

from irongrad.runtime.arrays import Array
from irongrad.runtime.manifest import EntryPoint
from irongrad.runtime.ranks.exchange import Exchange


class Module(Protocol):
    """A compiled program with its state; `LoadedModule` says what the members mean."""

    lock: threading.RLock
    exchange: Exchange | None
    driver: str
    is_local: bool

    def attach(self, exchange: Exchange) -> None:
        """See `LoadedModule`."""

    def refuse_overwritten_state(self) -> None:
        """See `LoadedModule`."""

    def close(self) -> None:
        """See `LoadedModule`."""

    def run(self, entry: EntryPoint, values: Sequence[Any]) -> list[Any]:
        """See `LoadedModule`."""

    def call(
        self, entry: EntryPoint, values: Sequence[Any], wanted: Container[str] | None = None, *, copies: bool = True
    ) -> list[Array]:
        """See `LoadedModule`."""

    def on_device(self, array: Any) -> ireert.DeviceArray:
        """See `LoadedModule`."""
