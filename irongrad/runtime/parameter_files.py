"""Read parameter files as IREE does: its own archives (`.irpa`), `.safetensors` and `.gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.parameter_archive import ALIGNMENT
from irongrad.runtime.status import reason

# Ends of names of files, and IREE's names of their formats.
FORMATS = ("irpa", "safetensors", "gguf")


def read_parameters(path: Path, kind: str = "irpa") -> dict[str, Array]:
    """Return the bytes of the tensors of a file by name, as views of the mapped file where they are in it.

    Args:
        path: the file.
        kind: its format, one of `FORMATS`.

    Raises:
        ArtifactError: the file is missing or damaged, or has something that IREE cannot read.
    """
    index = ireert.ParameterIndex()
    try:
        index.load(str(path), format=kind, mmap=True)
    except Exception as error:
        raise ArtifactError(f"{path} cannot be read as a file of {kind}: {reason(error)}") from None
    found: dict[str, Array] = {}
    for name, entry in index.items():
        if name in found:
            raise ArtifactError(f"{path} is damaged: it has the tensor {name} twice")
        found[name] = _bytes_of(entry)
        if found[name].size != entry.length:
            raise ArtifactError(f"{path} is damaged: its tensor {name} ends outside of the file")
    return found


def parameter_index(path: Path, kind: str, *, mapped: bool) -> ireert.ParameterIndex:
    """Return IREE's index of a file of format `kind`.

    IREE uses a tensor where it is mapped if it is aligned to `ALIGNMENT`. It would map and copy any other one, so that
    one is read from the open file, once for each module.

    Args:
        path: the file.
        kind: its format, one of `FORMATS`.
        mapped: whether the device can use mapped memory.
    """
    opened = ireert.ParameterIndex()
    opened.load(str(path), format=kind, mode="file_async")
    if not mapped:
        return opened
    whole, index = ireert.ParameterIndex(), ireert.ParameterIndex()
    whole.load(str(path), format=kind, mmap=True)
    for (name, entry), (_, unmapped) in zip(whole.items(), opened.items(), strict=True):
        if entry.is_splat:
            index.add_splat(name, entry.splat_pattern, entry.length)
        else:
            handle, offset = (entry if is_aligned(_bytes_of(entry)) else unmapped).file_storage
            index.add_from_file_handle(name, handle, entry.length, offset)
    return index


def is_aligned(array: Array) -> bool:
    """Whether IREE can use an array where it lies."""
    return array.ctypes.data % ALIGNMENT == 0


def _bytes_of(entry: Any) -> Array:
    """The bytes of an entry: a view if they lie in memory, else an array."""
    if entry.is_splat:
        return np.frombuffer(entry.splat_pattern * (entry.length // len(entry.splat_pattern)), np.uint8)
    return np.frombuffer(entry.file_view, np.uint8)
