"""What every key has: this machine's kind of CPU, and the sources of this package; found without torch."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

from irongrad.runtime.installed import PACKAGE

# In Linux's /proc/cpuinfo: what the processor is, not what it is doing.
CPUINFO = "/proc/cpuinfo"
_CPU = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features", "isa")


@functools.cache
def sources() -> str:
    """The sha256 of the package's own files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return sha256(*((p.relative_to(PACKAGE).as_posix(), p.read_bytes()) for p in files))


@functools.cache
def host() -> str:
    """This machine's kind of CPU; where that cannot be read, its name."""
    try:
        lines = Path(CPUINFO).read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return sha256(*platform.uname())
    return sha256(platform.machine(), *(x for x in lines if x.partition(":")[0].strip() in _CPU))


def sha256(*parts: object) -> str:
    """The sha256 of how `parts` are printed."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
