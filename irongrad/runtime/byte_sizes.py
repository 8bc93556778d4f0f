"""Memory sizes as text, such as `512MiB`."""

from __future__ import annotations

import re

from irongrad.runtime.errors import UserError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[A-Za-z]*)\s*")


def bytes_in(text: str, whole: int) -> int:
    """Return the number of bytes in a size such as `512MiB`, or in a percentage of `whole` such as `50%`.

    Raises:
        UserError: `text` is not a memory size.
    """
    found = _SIZE.fullmatch(text)
    is_fraction_of_a_byte = found is not None and not found[2] and "." in found[1]
    if found is None or is_fraction_of_a_byte or not (found[2] == "%" or found[2].upper() in _UNITS):
        raise UserError(f"{text!r} is no amount of memory; write for instance 512MiB, 2GB or 50%")
    number = float(found[1])
    if not found[2] and 0 < number <= 100:
        raise UserError(f"{text.strip()!r} has no unit; write {found[1]}% for a share, or for instance {found[1]}MiB")
    return int(number / 100 * whole) if found[2] == "%" else int(number * _UNITS[found[2].upper()])


def readable(count: int) -> str:
    """Format `count` bytes so that `bytes_in` can read them: rounded up to 0.1 KiB below 1 MiB, else to 0.1 MiB."""
    size, unit = (2**20, "MiB") if count >= 2**20 else (2**10, "KiB")
    return f"{-(-count * 10 // size) / 10:.1f}{unit}"
