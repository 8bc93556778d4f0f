"""Devices in a child process that `fork` made.

No thread survives a fork. A local-task device that the parent opened has no workers in the child, and a call on it
waits for ever. IREE 3.13.0 keeps one driver for the whole process (`get_cached_hal_driver`), and the driver of
local-task owns the workers. So the child cannot open a local-task device either. A GPU's driver does not work in the
child at all. local-sync computes in the thread that calls it, and works.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

from iree.runtime import system_setup

from irongrad.runtime.devices import devices_of, driver_of
from irongrad.runtime.errors import UserError

_WITHOUT_THREADS = "local-sync"


class OnDevice(Protocol):
    """An object that holds a device.

    Attributes:
        driver: the device's driver.
        lock: held during a call.
    """

    driver: str
    lock: threading.RLock

    def held_objects(self) -> tuple[Any, ...]:
        """Return the objects of IREE that it holds."""

    def inherited(self) -> None:
        """Called in a child process."""


_open: WeakSet[OnDevice] = WeakSet()
# The drivers that an ancestor of this process opened before it forked.
_of_ancestors: set[str] = set()


def register(opened: OnDevice) -> None:
    """Remember an object that holds a device, for the children of this process."""
    _open.add(opened)


def opened() -> list[OnDevice]:
    """Return the objects of this process that hold a device."""
    return list(_open)


def survives(driver: str) -> bool:
    """Return whether a device of this driver works in a child process."""
    return driver == _WITHOUT_THREADS


def refuse_drivers_of_ancestors(device: str) -> None:
    """Refuse to open a device whose driver an ancestor of this process opened.

    Raises:
        UserError: it did, and the driver does not survive a fork.
    """
    if driver_of(device) in _of_ancestors:
        raise UserError(
            f"the parent of process {os.getpid()} opened the device {driver_of(device)}, so its threads are there and "
            f"not here. {way_out()}"
        )


def way_out() -> str:
    """Return what a user can do in a child process."""
    return (
        "Start the process with multiprocessing.get_context('spawn') instead of fork, fork before the parent loads an "
        f"artifact, or load it with device={_WITHOUT_THREADS!r}, which has no threads"
    )


def _after_fork_in_child() -> None:
    for opened in list(_open):
        _leak(*opened.held_objects())
        opened.inherited()
    for uri, device in system_setup._GLOBAL_DEVICES_BY_URI.items():
        _leak(device)
        if not survives(driver_of(uri)):
            _of_ancestors.add(driver_of(uri))
    devices_of.cache_clear()


def _leak(*objects: Any) -> None:
    """Never free these objects: their destructors wait for a thread that does not exist, those of local-sync too.

    If such a child ends through `sys.exit`, nanobind prints that they were leaked; one that ends through `os._exit`, as
    those of multiprocessing do, prints nothing.
    """
    for item in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
