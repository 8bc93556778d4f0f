"""The devices that IREE finds on this machine, with the properties that their drivers report."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import iree.runtime as ireert

from irongrad.runtime.cpu import cpu_name


@dataclass(frozen=True)
class Device:
    """A device of this machine.

    Attributes:
        uri: IREE's device URI, such as `vulkan://GPU-6d65…`.
        name: the name that the driver, or the CPU itself, reports.
        driver: the driver and its version; empty if IREE does not report them.
        kind: the device type, such as `cpu` or `discrete_gpu`; empty if IREE does not report it.
        subgroup: the default, the smallest and the largest subgroup size, in lanes; zeros if unknown.
        details: everything that the driver reports, as text.
    """

    uri: str
    name: str = ""
    driver: str = ""
    kind: str = ""
    subgroup: tuple[int, int, int] = (0, 0, 0)
    details: str = ""


def driver_of(uri: str) -> str:
    """Return the IREE driver in a device URI: `local-task`, `vulkan`, `cuda`, …."""
    return uri.partition(":")[0]


def is_local(uri: str) -> bool:
    """Return whether `uri` names the CPU: IREE's local-task or local-sync."""
    return uri.startswith("local-")


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the variables by which a process knows that mpirun started it, while a device opens.

    With one of them set, IREE 3.13.0 looks for libmpi.so as it opens any device, and fails where it finds none ("MPI
    runtime library not available"). tests/runtime/ranks/test_mpi.py tells when it no longer does.
    """
    hidden = {name: os.environ.pop(name) for name in _LAUNCHERS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@functools.cache
def devices_of(driver: str) -> tuple[Device, ...]:
    """List the devices of an IREE driver; there are none if the driver's library is missing."""
    if is_local(driver):
        return (Device(driver, cpu_name(), kind="cpu"),)
    try:
        with without_launcher():
            loaded = ireert.get_driver(driver)
            listed = loaded.query_available_devices()
    except Exception:
        return ()  # the driver's library is not installed, or finds no device
    return tuple(_device(driver, d["path"], d["name"], loaded.dump_device_info(d["device_id"])) for d in listed)


def find_device(uri: str) -> Device | None:
    """Return the device that `uri` names, or None if there is no such device.

    The URI names a device by path or by number; without either it means the driver's first device.
    """
    _, _, path = uri.partition("://")
    devices = devices_of(driver_of(uri))
    if path.isdigit():
        return devices[int(path)] if int(path) < len(devices) else None
    return next((d for d in devices if path in ("", d.uri.partition("://")[2])), None)


def _device(driver: str, path: str, name: str, details: str) -> Device:
    properties = dict(re.findall(r"^(\w+): (.*)$", details, re.MULTILINE))
    lanes = [re.search(rf"\b{key}=(\d+)", properties.get("subgroup", "")) for key in _LANES]
    size, least, most = (int(m.group(1)) if m else 0 for m in lanes)
    version = " ".join(properties[k] for k in ("driver", "driver_info") if k in properties)
    return Device(
        uri=f"{driver}://{path}" if path else driver,
        name=properties.get("name", name),
        driver=version or properties.get("driver_version", ""),
        kind=properties.get("type", ""),
        subgroup=(size, least, most),
        details=details,
    )


_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LANES = ("size", "minSubgroupSize", "maxSubgroupSize")
