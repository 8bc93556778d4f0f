"""Counts of operations and of bytes as text."""

from __future__ import annotations

_PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def amount(count: int | None, unit: str = "") -> str:
    """A count of a unit with a prefix of the SI: `1.20 GFLOP`."""
    if count is None:
        return "unknown"
    for factor, prefix in _PREFIXES:
        if count >= factor:
            return f"{count / factor:.2f} {prefix}{unit}"
    return f"{count} {unit}".rstrip()


def unit_of(count: int) -> tuple[int, str]:
    """The largest binary unit of which `count` bytes has at least one: its bytes, and its name."""
    return next(((size, name) for size, name in _UNITS if count >= size), (1, "B"))


def nbytes(count: int) -> str:
    """A count of bytes to a tenth of a binary unit: `52.7 MiB`."""
    size, name = unit_of(count)
    return f"{count / size:.1f} {name}" if size > 1 else f"{count} {name}"
