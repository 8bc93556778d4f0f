"""Read arrays from .npy and .npz files: those that are asked for, and within the memory that is free.

The formats are numpy's (numpy.org, "numpy.lib.format"): an .npz file is a zip archive with one .npy file an array.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

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
            listed = archive.infolist()
            members = {i.filename.removesuffix(".npy"): i for i in listed}
            if len(members) < len(listed):
                raise _DamagedError("it has an array twice")
            if missing := [n for n in names if n not in members]:
                raise GuardError(f"{path} has the arrays {_listed(members)}; the step also needs {_listed(missing)}")
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
    version = npy.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise _DamagedError(f"{name} has the .npy version {version}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(member)
    if dtype.hasobject:
        raise _DamagedError(f"{name} holds Python objects, which are not read; save it as numbers")
    if any(d < 0 for d in shape):
        raise _DamagedError(f"{name} has the shape {shape}")
    needed = math.prod(shape) * dtype.itemsize
    if needed > size:
        raise _DamagedError(f"{name} says that it has {readable(needed)}, and there are {readable(size)}")
    if needed > free:
        raise _DamagedError(f"{name} has {readable(needed)}, and {readable(free)} of memory are free; split the file")
    flat = np.empty(math.prod(shape), dtype)
    if needed:
        _fill(flat.view(np.uint8).data, member, name)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


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
