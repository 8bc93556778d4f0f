"""Read arrays from .npy and .npz files: those that are asked for, and within the memory that is free.

The formats are numpy's (numpy.org, "numpy.lib.format"): an .npz file is a zip archive with one .npy file an array.
"""

from __future__ import annotations

import math
import mmap
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from irongrad.runtime.argument_names import identifier
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import GuardError

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 24
_NPY_MAGIC = b"\x93NUMPY"


class _DamagedError(Exception):
    """What is wrong with a file, in words."""


def read_npz(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Read the arrays `names` from the .npz file at `path`; other arrays in it are not read.

    Raises:
        GuardError: the file is missing or damaged, lacks an array, or one does not fit into the memory that is free.
    """
    with _refusing(path, ".npz"), path.open("rb") as file:
        if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
            raise _DamagedError(
                "it is one array (.npy); save one array for each input: numpy.savez(FILE, name=array, …)"
            )
        with zipfile.ZipFile(file) as archive:
            members = _members(archive, path, names)
            free = _free_memory()
            arrays: dict[str, Array] = {}
            for name in names:
                with archive.open(members[name]) as member:
                    arrays[name] = _array(name, member, members[name].file_size, free)
                free -= arrays[name].nbytes
    return arrays


def read_npy(path: Path) -> Array:
    """Read the array in the .npy file at `path`.

    Raises:
        GuardError: the file is missing or damaged, or the array does not fit into the memory that is free.
    """
    with _refusing(path, ".npy"), path.open("rb") as file:
        if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            raise _DamagedError("it does not begin as one; an .npz file holds several arrays, and is not read here")
        file.seek(0)
        return _array("it", file, os.fstat(file.fileno()).st_size, _free_memory())


@dataclass(frozen=True)
class MappedArray:
    """An array in a file, which is mapped when it is read.

    Attributes:
        path: the file.
        start: the first byte of its elements.
        header: its shape, order and dtype.
    """

    path: Path
    start: int
    header: _Header

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.header.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements, in the byte order of this machine."""
        return self.header.dtype.newbyteorder("=")

    def of(self, mapped: mmap.mmap) -> Array:
        """Return the array in the mapped file; its elements have the byte order of the file."""
        flat = np.frombuffer(mapped, self.header.dtype, math.prod(self.shape), self.start)
        return self.header.shaped(flat)


def find_in_npz(path: Path, names: Sequence[str]) -> dict[str, MappedArray]:
    """Find the arrays `names` in the .npz file at `path`, to map them; their elements are not read.

    Raises:
        GuardError: the file is missing or damaged, lacks an array, or is compressed.
    """
    with _refusing(path, ".npz"), path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = _members(archive, path, names)
        return {name: _place(name, path, file, archive, members[name]) for name in names}


def find_in_npy(path: Path) -> MappedArray:
    """Find the array in the .npy file at `path`, to map it; its elements are not read.

    Raises:
        GuardError: the file is missing or damaged.
    """
    with _refusing(path, ".npy"), path.open("rb") as file:
        header = _header("it", file, os.fstat(file.fileno()).st_size)
        _check_end("it", file, file.tell() + header.nbytes)
        return MappedArray(path, file.tell(), header)


def is_too_large(path: Path) -> bool:
    """Whether the file would take over half of the memory that is free."""
    try:
        return path.stat().st_size > _free_memory() // 2
    except OSError:
        return False


def is_compressed(path: Path) -> bool:
    """Whether an array of the .npz file at `path` is compressed.

    Raises:
        GuardError: the file is missing or damaged.
    """
    with _refusing(path, ".npz"), zipfile.ZipFile(path) as archive:
        return any(i.compress_type != zipfile.ZIP_STORED for i in archive.infolist())


def _place(name: str, path: Path, file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> MappedArray:
    """Where the elements of an array of an archive begin in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise _DamagedError(f"{name} is compressed, and cannot be mapped; write the file with numpy.savez")
    with archive.open(info) as member:
        header = _header(name, member, info.file_size)
        inside = member.tell()
    # The local header of a member: 26 bytes, the lengths of its name and of the extra field, and these two.
    file.seek(info.header_offset + 26)
    lengths = file.read(4)
    begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    _check_end(name, file, begin + inside + header.nbytes)
    return MappedArray(path, begin + inside, header)


def _check_end(name: str, file: IO[bytes], end: int) -> None:
    if end > (size := os.fstat(file.fileno()).st_size):
        raise _DamagedError(f"{name} ends at byte {end}, and the file has {size}")


def _members(archive: zipfile.ZipFile, path: Path, names: Sequence[str]) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive by the names of their arrays, or of the arguments for these, `names` among them."""
    listed = archive.infolist()
    members = {i.filename.removesuffix(".npy"): i for i in listed}
    if len(members) < len(listed):
        raise _DamagedError("it has an array twice")
    own = dict(members)
    plain = [identifier(name) for name in own]
    members = {
        argument: own[name] for name, argument in zip(own, plain, strict=True) if plain.count(argument) == 1
    } | own
    if missing := [n for n in names if n not in members]:
        raise GuardError(f"{path} has the arrays {_listed(own)}; the step also needs {_listed(missing)}")
    return members


@contextmanager
def _refusing(path: Path, kind: str) -> Iterator[None]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise _DamagedError("it is a pipe or a device")
        yield
    except GuardError:
        raise
    except MemoryError:
        raise GuardError(f"{path} does not fit into memory") from None
    except OSError as error:
        raise GuardError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # zipfile, its decompressors and numpy's reader of headers have a dozen errors for damaged data: LZMAError,
        # TokenError and NotImplementedError among them.
        raise GuardError(f"{path} cannot be read as an {kind} file: {' '.join(str(error).split())}") from None


def _array(name: str, member: IO[bytes], size: int, free: int) -> Array:
    """Read an array; its header must agree with the size of the member before any memory is taken."""
    header = _header(name, member, size)
    needed = header.nbytes
    if needed > free:
        raise _DamagedError(f"{name} has {readable(needed)}, and {readable(free)} of memory are free; split the file")
    flat = np.empty(math.prod(header.shape), header.dtype)
    if needed:
        _fill(flat.view(np.uint8).data, member, name)
    array = header.shaped(flat)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@dataclass(frozen=True)
class _Header:
    """What an .npy file says about its array."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def shaped(self, flat: Array) -> Array:
        """The array whose elements are `flat`, in the order of the file."""
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


def _header(name: str, member: IO[bytes], size: int) -> _Header:
    """Read the header of an array, which must agree with the size of its member."""
    version = npy.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise _DamagedError(f"{name} has the .npy version {version}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(member)
    if dtype.hasobject:
        raise _DamagedError(f"{name} holds Python objects, which are not read; save it as numbers")
    if any(d < 0 for d in shape):
        raise _DamagedError(f"{name} has the shape {shape}")
    header = _Header(shape, fortran, dtype)
    if header.nbytes > size:
        raise _DamagedError(f"{name} says that it has {readable(header.nbytes)}, and there are {readable(size)}")
    return header


def _fill(view: memoryview, member: IO[bytes], name: str) -> None:
    start = 0
    while start < len(view):
        chunk = member.read(min(_CHUNK, len(view) - start))
        if not chunk:
            raise _DamagedError(f"{name} ends after {start} of {len(view)} bytes")
        view[start : start + len(chunk)] = chunk
        start += len(chunk)
    while member.read(_CHUNK):  # to the end, where zipfile compares the checksum
        pass


def _free_memory() -> int:
    """The bytes that this process can still take; a large number if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            known = dict(line.split(":", 1) for line in lines)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if hasattr(os, "sysconf") else 1 << 62


def _listed(names: Any) -> str:
    shown = [str(n)[:60] for n in list(names)[:10]]
    return ", ".join(shown) + (", …" if len(names) > 10 else "") if shown else "none"
