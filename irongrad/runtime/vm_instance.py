"""The `VmInstance` of IREE that all modules of this process share, and the devices they run on.

IREE 3.13.0 keeps the types of its references in variables of the process. Every new instance sets each of them to zero
for a moment (`iree_vm_instance_register_type` begins with `*out_registration = 0`). A call that another thread runs at
that moment fails with "ref type mismatch", or never returns. Two things make an instance: `VmInstance`, and the driver
of a local device, for its VMVX loader. So there is one `VmInstance`, made before any call, and a driver is made while
no session is in a call. Not covered: other code that does either beside a call, and a call that does not end for
`_PATIENCE` seconds, as it may itself wait for the thread that opens the device.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import iree.runtime as ireert

from irongrad.runtime import forks
from irongrad.runtime.devices import driver_of, is_local, without_launcher

_PATIENCE = 5.0
_opening = threading.Lock()
_made: set[str] = set()
_instances: list[Any] = [ireert.VmInstance()]

# nanobind would report an instance that outlives the interpreter's modules as a leak.
atexit.register(_instances.clear)


def vm_instance() -> Any:
    """Return the instance of this process; as the interpreter exits, another one."""
    return _instances[0] if _instances else ireert.VmInstance()


def open_device(uri: str, *, cache: bool = True) -> Any:
    """Open a device, or return the one that was opened before.

    Args:
        uri: an IREE device URI.
        cache: whether IREE may return a device that was opened before, and keeps this one.

    Raises:
        Exception: IREE cannot open it.
    """
    driver = driver_of(uri)
    with _opening, without_launcher():
        if is_local(uri) and driver not in _made:
            # local-sync has no threads, so it is made with the first of the two, which often is before any call.
            with _between_calls():
                ireert.get_driver("local-sync")
                ireert.get_driver(driver)
            _made.update(("local-sync", driver))
        return ireert.get_device(uri, cache=cache)


@contextmanager
def _between_calls() -> Iterator[None]:
    """Hold the lock of every open module."""
    end = time.monotonic() + _PATIENCE
    with ExitStack() as held:
        for module in forks.opened():
            if module.lock.acquire(timeout=max(0.0, end - time.monotonic())):
                held.callback(module.lock.release)
        yield
