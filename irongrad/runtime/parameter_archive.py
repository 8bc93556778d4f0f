"""Write IREE's parameter archives (`.irpa`): a value is stored once, and a number that repeats takes no space.

The format is described in runtime/src/iree/schemas/parameter_archive.h of IREE 3.13.0: a header, a table of entries,
the names, and the data. Several entries may refer to the same data. A splat entry has a pattern in place of data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from irongrad.runtime.arrays import Array

# Magic, version, size of the header, offset of a further header, flags; the number of entries; the offset and the size
# of the entries, of the names and of the data.
_HEADER = struct.Struct("<4s2H3Q Q 2Q2Q2Q")
_MAGIC = b"IRPA"
# Size and type of the entry, flags; offset and size of the name and of the metadata; alignment of the data.
_ENTRY = struct.Struct("<QIQ 2Q2Q Q")
_OF_SPLAT = struct.Struct("<Q16sB")  # the size of the tensor, the pattern and the size of the pattern
_OF_DATA = struct.Struct("<2Q")  # offset and size
_SPLAT, _DATA = 1, 2

_ALIGNMENT_OF_ENTRIES = 16
# IREE uses data where it lies, as in a mapped file, if it is aligned like this (IREE_HAL_HEAP_BUFFER_ALIGNMENT).
ALIGNMENT = 64
# IREE fills memory with patterns of these sizes only (iree_hal_command_buffer_fill_buffer).
_PATTERNS = (1, 2, 4)


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is.

    Attributes:
        pattern: what the tensor repeats; empty if it has data.
        offset: the first byte of the data.
        size: the size of the tensor in bytes.
    """

    pattern: bytes
    offset: int
    size: int


def write_archive(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write `arrays` to an archive; equal arrays are stored once, and those of one repeated value as that value.

    Raises:
        OSError: the file cannot be written.
    """
    entries: dict[str, _Entry] = {}
    stored: dict[bytes, int] = {}  # offsets by the hash of the data
    data: list[Array] = []
    end = 0
    for name, array in arrays.items():
        raw = _bytes_of(array)
        if pattern := _repeated(raw):
            entries[name] = _Entry(pattern, 0, raw.size)
            continue
        digest = hashlib.sha256(raw.data).digest()
        if digest not in stored:
            stored[digest] = end
            data.append(raw)
            end = _aligned(end + raw.size, ALIGNMENT)
        entries[name] = _Entry(b"", stored[digest], raw.size)
    with path.open("wb") as file:
        file.write(_table(entries, end))
        for raw in data:
            file.write(raw.data)
            file.write(bytes(_aligned(raw.size, ALIGNMENT) - raw.size))


def _table(entries: Mapping[str, _Entry], size: int) -> bytes:
    """Everything before the data: the header, the entries and their names.

    Args:
        entries: the entries by name.
        size: the size of the data.
    """
    names = b"".join(name.encode() for name in entries)
    table, begin = b"", 0
    for name, entry in entries.items():
        length = len(name.encode())
        table += _encoded(entry, begin, length)
        table += bytes(-len(table) % _ALIGNMENT_OF_ENTRIES)
        begin += length
    of_table = _aligned(_HEADER.size, _ALIGNMENT_OF_ENTRIES)
    of_names = of_table + len(table)
    of_data = _aligned(of_names + len(names), ALIGNMENT)
    segments = (of_table, len(table), of_names, len(names), of_data, size)
    header = _HEADER.pack(_MAGIC, 0, 0, _HEADER.size, 0, 0, len(entries), *segments)
    return (header.ljust(of_table, b"\0") + table + names).ljust(of_data, b"\0")


def _encoded(entry: _Entry, name: int, length: int) -> bytes:
    """An entry of the table, whose name has `length` bytes from `name` on."""
    if entry.pattern:
        kind, alignment = _SPLAT, 0
        rest = _OF_SPLAT.pack(entry.size, entry.pattern, len(entry.pattern))
    else:
        kind, alignment = _DATA, ALIGNMENT
        rest = _OF_DATA.pack(entry.offset, entry.size)
    return _ENTRY.pack(_ENTRY.size + len(rest), kind, 0, name, length, 0, 0, alignment) + rest


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _repeated(raw: Array) -> bytes:
    """The pattern that `raw` repeats; empty if there is none, or if it is no shorter."""
    for size in _PATTERNS:
        if raw.size % size == 0 and raw.size > size and _repeats(raw, size):
            return raw[:size].tobytes()
    return b""


def _repeats(raw: Array, size: int) -> bool:
    # The beginning decides in nearly every case.
    return all(np.array_equal(part[size:], part[:-size]) for part in (raw[: 16 * size], raw))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
