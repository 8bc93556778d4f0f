"""The devices that IREE finds on this machine, and what they say of themselves."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import iree.runtime as ireert

from irongrad.runtime.cpu import cpu_name


@dataclass(frozen=True)
class Device:
    """A device of this machine.

    Attributes:
        uri: IREE's name of it, such as `vulkan://GPU-6d65…`.
        name: what its driver, or the CPU, calls it.
        driver: the driver with its version; empty where IREE does not say.
        kind: `cpu`, `discrete_gpu` and the like; empty where IREE does not say.
        subgroup: how many lanes run in step by default, the least and the most; zeros where that is not known.
        details: all that the driver says, as text.
    """

    uri: str
    name: str = ""
    driver: str = ""
    kind: str = ""
    subgroup: tuple[int, int, int] = (0, 0, 0)
    details: str = ""


def driver_of(uri: str) -> str:
    """IREE's driver of a device URI: `local-task`, `vulkan`, `cuda`, …."""
    return uri.partition(":")[0]


def is_local(uri: str) -> bool:
    """Whether `uri` is the CPU, through IREE's local-task or local-sync."""
    return uri.startswith("local-")


@functools.cache
def devices_of(driver: str) -> tuple[Device, ...]:
    """The devices of one of IREE's drivers; none where its library is missing."""
    if is_local(driver):
        return (Device(driver, cpu_name(), kind="cpu"),)
    try:
        loaded = ireert.get_driver(driver)
        listed = loaded.query_available_devices()
    except Exception:
        return ()  # the driver's library is not installed, or finds no device
    return tuple(_device(driver, d["path"], d["name"], loaded.dump_device_info(d["device_id"])) for d in listed)


def find_device(uri: str) -> Device | None:
    """The device that `uri` names, by path or number; without either its driver's first."""
    _, _, path = uri.partition("://")
    devices = devices_of(driver_of(uri))
    if path.isdigit():
        return devices[int(path)] if int(path) < len(devices) else None
    return next((d for d in devices if path in ("", d.uri.partition("://")[2])), None)


def _device(driver: str, path: str, name: str, details: str) -> Device:
    said = dict(re.findall(r"^(\w+): (.*)$", details, re.MULTILINE))
    lanes = [re.search(rf"\b{key}=(\d+)", said.get("subgroup", "")) for key in _LANES]
    size, least, most = (int(m.group(1)) if m else 0 for m in lanes)
    version = " ".join(said[k] for k in ("driver", "driver_info") if k in said)
    return Device(
        uri=f"{driver}://{path}" if path else driver,
        name=said.get("name", name),
        driver=version or said.get("driver_version", ""),
        kind=said.get("type", ""),
        subgroup=(size, least, most),
        details=details,
    )


_LANES = ("size", "minSubgroupSize", "maxSubgroupSize")
