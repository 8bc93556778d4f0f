"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from irongrad.runtime.errors import UserError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[A-Za-z]*)\s*")


def bytes_in(text: str, whole: int) -> int:
    """The bytes that `512MiB` says, or `50%` of `whole`.

    Raises:
        UserError: it says neither.
    """
    found = _SIZE.fullmatch(text)
    is_fraction_of_a_byte = found is not None and not found[2] and "." in found[1]
    if found is None or is_fraction_of_a_byte or not (found[2] == "%" or found[2].upper() in _UNITS):
        raise UserError(f"{text!r} is no amount of memory; write for instance 512MiB, 2GB or 50%")
    number = float(found[1])
    return int(number / 100 * whole) if found[2] == "%" else int(number * _UNITS[found[2].upper()])


def readable(count: int) -> str:
    """`count` bytes, rounded up, as `bytes_in` reads it: in KiB below one MiB."""
    size, unit = (2**20, "MiB") if count >= 2**20 else (2**10, "KiB")
    return f"{-(-count * 10 // size) / 10:.1f}{unit}"
