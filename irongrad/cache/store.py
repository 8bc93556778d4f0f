"""A directory of limited size with immutable entries; each entry is a set of files under a key.

Processes share it without locks. An entry is one archive. It is written under a temporary name and renamed into place,
so a reader sees a complete entry or none, even if a writer is killed. An archive carries the sha256 of its files, and a
damaged entry counts as missing. The least recently used entry is evicted first.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from irongrad.runtime.byte_sizes import bytes_in
from irongrad.runtime.errors import UserError

DIRECTORY_VARIABLE = "IRONGRAD_CACHE_DIR"
SIZE_VARIABLE = "IRONGRAD_CACHE_SIZE"
DEFAULT_SIZE = "10GiB"

# Part of the path of every entry: a new layout of entries starts with an empty cache.
_VERSION = "v1"
_HASHES = "sha256.json"
_TEMPORARY = ".new-"
# No process takes that long to write an entry. An older temporary file was left by a process that was killed.
_ABANDONED_SECONDS = 3600.0
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        kind: the kind of its contents, such as `artifact`.
        path: the path of its archive.
        size: its size in bytes.
        used: when it was last written or read, in seconds since the epoch.
    """

    kind: str
    path: Path
    size: int
    used: float


@dataclass(frozen=True)
class Store:
    """A cache directory.

    Attributes:
        directory: its path; the directory is created when the first entry is stored.
        limit: the largest total size of all entries, in bytes.
    """

    directory: Path
    limit: int

    def get(self, kind: str, key: str, into: Path) -> bool:
        """Write the files under `key` to the directory `into`; return False if there is no complete entry."""
        path = self._path(kind, key)
        try:
            if not path.is_file():  # there is no entry, or a pipe in its place
                raise FileNotFoundError(path)
            file = path.open("rb")
        except OSError:
            return False
        try:
            with file, zipfile.ZipFile(file) as archive:
                _extract_all(archive, into)
        except _UnwritableError:
            return False
        except Exception:
            # zipfile, zlib, struct and json have a dozen errors for damaged data, NotImplementedError and RuntimeError
            # among them. Whatever cannot be read is missing, and in the way.
            with suppress(OSError):
                path.unlink()
            return False
        with suppress(OSError):  # the cache may be read-only
            os.utime(path)
        return True

    def put(self, kind: str, key: str, files: Mapping[str, Path | bytes]) -> None:
        """Store `files` under `key`, by their names in the entry; files larger than the limit are not stored.

        If the directory cannot be written, this only warns: the build is good even if it is not stored.
        """
        if sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in files.values()) > self.limit:
            return
        path = self._path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
            try:
                with os.fdopen(handle, "wb") as file:
                    _write(file, files)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
            self._evict()
        except OSError as error:
            warnings.warn(f"the compile cache {self.directory} cannot be written: {error}", stacklevel=2)

    def entries(self) -> list[Entry]:
        """Return every entry, the least recently used first."""
        found: list[Entry] = []
        for path in self._root.glob("*/*/*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process has evicted it
                continue
            if not path.name.startswith(_TEMPORARY):
                found.append(Entry(path.parent.parent.name, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda e: e.used)

    def clear(self) -> int:
        """Remove all entries, and return their number."""
        count = len(self.entries())
        shutil.rmtree(self._root, ignore_errors=True)
        return count

    @property
    def _root(self) -> Path:
        return self.directory / _VERSION

    def _path(self, kind: str, key: str) -> Path:
        return self._root / kind / key[:2] / key

    def _evict(self) -> None:
        """Remove the temporary files of killed processes, then the least recently used entries above the limit."""
        for path in self._root.glob(f"*/*/{_TEMPORARY}*"):
            if _age(path) > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
        entries = self.entries()
        total = sum(e.size for e in entries)
        for entry in entries:
            if total <= self.limit:
                return
            entry.path.unlink(missing_ok=True)
            total -= entry.size


def default_store() -> Store | None:
    """Return the user's cache as the environment configures it; None if its size limit is 0.

    Raises:
        UserError: `IRONGRAD_CACHE_SIZE` is not a size.
    """
    limit = size_limit()
    return Store(default_directory(), limit) if limit else None


def size_limit() -> int:
    """Return the size limit of the user's cache in bytes.

    Raises:
        UserError: as `default_store`.
    """
    text = os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE
    if "%" in text:
        raise UserError(f"{SIZE_VARIABLE} is {text!r}; it must be an amount, such as {DEFAULT_SIZE}, or 0")
    return bytes_in(text, 0)


def default_directory() -> Path:
    """Return the directory of the user's cache."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("irongrad", appauthor=False))


def _write(file: IO[bytes], files: Mapping[str, Path | bytes]) -> None:
    """Write an archive with hashes of the bytes written, so that they match even if a file changes meanwhile."""
    hashes: dict[str, str] = {}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            with archive.open(name, "w", force_zip64=True) as member, _opened(content) as source:
                hashes[name] = _copy(source, member)
        archive.writestr(_HASHES, json.dumps(hashes))


def _opened(content: Path | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy all of `source` to `target`, and return its sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


class _UnwritableError(Exception):
    """The directory for the files cannot be written; the entry may be good."""


def _extract_all(archive: zipfile.ZipFile, into: Path) -> None:
    hashes: dict[str, str] = json.loads(archive.read(_HASHES))
    for name, sha256 in hashes.items():
        if Path(name).name != name or _extract(archive, name, into / name) != sha256:
            raise zipfile.BadZipFile(name)


def _extract(archive: zipfile.ZipFile, name: str, output: Path) -> str:
    """Write a member of an archive to `output`, and return its sha256."""
    try:
        target = output.open("wb")
    except OSError as error:
        raise _UnwritableError from error
    with target, archive.open(name) as source:
        return _copy(source, target)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
