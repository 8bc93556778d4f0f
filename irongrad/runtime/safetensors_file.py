"""Read safetensors files: one reader for every way in, which refuses what other readers read differently.

A file has the header's length (8 bytes), the header (JSON: a tensor's dtype, shape and place, by name), and the data.
The format is described at https://github.com/huggingface/safetensors. This reader also refuses a name that occurs
twice: some readers take the first, some the last. A checkpoint of ours carries a checksum of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError

# The metadata key of everything that we record about a file, as JSON. There is one key only, because the
# safetensors library writes several in an order that differs from run to run.
ABOUT = "irongrad"
SHA256 = "sha256"
_FORMAT = "irongrad-1"
# The size of a header that we write is a multiple of this.
_ALIGNMENT = 64
# The library's own limit of a header's length.
_LONGEST_HEADER = 100_000_000

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        dtype: numpy's name of its element type.
        shape: its dimensions.
        start: its first byte in the file.
        size: its size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a file says about itself.

    Attributes:
        tensors: its tensors by name.
        metadata: its metadata, text by text.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """What our writers recorded about the file; empty for a file from elsewhere."""
        try:
            about = json.loads(self.metadata.get(ABOUT, "{}"))
        except (ValueError, RecursionError):
            return {}
        return about if isinstance(about, dict) else {}


class TensorFile:
    """An open safetensors file."""

    def __init__(self, file: BufferedReader) -> None:
        """
        Raises:
            ValueError: it is no well-formed safetensors file.
        """
        self._file = file
        self.header = _header(file)

    def array(self, name: str) -> Array:
        """Return a tensor as a new array."""
        tensor = self.header.tensors[name]
        array = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._file.seek(tensor.start)
        if self._file.readinto(array.reshape(-1).view(np.uint8).data) != tensor.size:
            raise ValueError("it has become shorter")
        return array

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield every tensor, in the order of the file."""
        for name in sorted(self.header.tensors, key=lambda n: (self.header.tensors[n].start, n)):
            yield name, self.array(name)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open the safetensors file at `path`; any error while it is read becomes an ArtifactError.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is no file")
        with Path(path).open("rb") as file:
            yield TensorFile(file)
    except FileNotFoundError:
        raise ArtifactError(f"the checkpoint {path} does not exist") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{path} is not a readable safetensors file: {_reason(error)}") from None


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Array], Header]:
    """Read a whole file, and compare its tensors with its checksum if it has one.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    with opened(path) as file:
        arrays = dict(file.arrays())
        checksum = Checksum()
        for name, array in arrays.items():
            checksum.add(name, array)
        checksum.compare(file.header)
    return arrays, file.header


class Checksum:
    """The sha256 of a set of named tensors, in whatever order they come."""

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}

    def add(self, name: str, array: Array) -> None:
        """Include a tensor."""
        digest = hashlib.sha256(json.dumps([name, array.dtype.name, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._tensors[name] = digest.hexdigest()

    @property
    def text(self) -> str:
        """The checksum of the tensors so far, in hexadecimal."""
        return hashlib.sha256(json.dumps(sorted(self._tensors.items())).encode()).hexdigest()

    def compare(self, header: Header) -> None:
        """Compare it with the checksum that a file carries, if it carries one.

        Raises:
            ValueError: they differ.
        """
        recorded = header.about.get(SHA256)
        if recorded is not None and recorded != self.text:
            raise ValueError("its tensors differ from its checksum, so it was damaged after it was written")


def metadata(arrays: Iterable[tuple[str, Array]], about: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file of `arrays`: a checksum, and what `about` says."""
    checksum = Checksum()
    for name, array in arrays:
        checksum.add(name, array)
    return {ABOUT: json.dumps({"format": _FORMAT, SHA256: checksum.text, **about})}


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], about: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file; behind it come the bytes of the tensors, in their order.

    Args:
        tensors: the name, the dtype by numpy's name, and the shape of each tensor.
        about: what the file says about itself. It has no checksum, because the tensors are not known yet.
    """
    spelled = {name: code for code, name in _DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {ABOUT: json.dumps({"format": _FORMAT, **about})}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * numpy_dtype(dtype).itemsize
        entries[name] = {"dtype": spelled[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype called `name`; that of ml_dtypes for bfloat16 and the 8-bit floats."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _header(file: BufferedReader) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"its header of {length} bytes does not fit into the file's {size}")
    entries = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
    if not isinstance(entries, dict):
        raise ValueError("its header is no table of tensors")
    about = entries.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise ValueError("its metadata is not text")
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != end:
            raise ValueError(f"its tensor {name!r} begins at byte {tensor.start} instead of {end}")
        end += tensor.size
    if end != size:
        raise ValueError(f"it has {size} bytes, and its tensors end at {end}")
    return Header(tensors, about)


def _without_duplicates(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        names = [name for name, _ in items]
        raise ValueError(f"its header has {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _tensor(name: str, entry: Any, begin: int) -> Tensor:
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header does not say the dtype, shape and place of {name!r}") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"the shape or the place of {name!r} is no whole number")
    size = math.prod(shape) * numpy_dtype(dtype).itemsize
    if stop - start != size:
        raise ValueError(f"{name!r} is {dtype}{list(shape)} in {stop - start} bytes")
    return Tensor(dtype, shape, begin + start, size)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its header is nested too deeply"
    if isinstance(error, MemoryError):
        return "there is not enough memory for its tensors"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
