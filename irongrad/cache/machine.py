"""The part that all keys share: this machine's kind of CPU, and this package's sources; works without torch."""

from __future__ import annotations

import functools
import hashlib
import platform
from dataclasses import fields, is_dataclass
from pathlib import Path

from irongrad.runtime.installed import PACKAGE

# The fields of Linux's /proc/cpuinfo that describe the processor, not its current load.
CPUINFO = "/proc/cpuinfo"
_CPU = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features", "isa")


@functools.cache
def sources() -> str:
    """Return the sha256 of the package's own files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return sha256(*((p.relative_to(PACKAGE).as_posix(), p.read_bytes()) for p in files))


@functools.cache
def host() -> str:
    """Return a hash of this machine's kind of CPU, or of the machine's name if the kind cannot be read."""
    try:
        lines = Path(CPUINFO).read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return sha256(*platform.uname())
    return sha256(platform.machine(), *(x for x in lines if x.partition(":")[0].strip() in _CPU))


def sha256(*parts: object) -> str:
    """Return the sha256 of the `repr` of `parts`, with the members of sets in one order for all processes."""
    return hashlib.sha256(repr(_ordered(parts)).encode()).hexdigest()


def _ordered(value: object) -> object:
    """`value` with sorted members in place of its sets: their order differs by PYTHONHASHSEED."""
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(_ordered(v)) for v in value)
    if type(value) is dict:
        return "dict", [(_ordered(k), _ordered(v)) for k, v in value.items()]
    if isinstance(value, tuple | list):
        return type(value).__name__, [_ordered(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple(_ordered(getattr(value, f.name)) for f in fields(value) if f.repr)
    return value
