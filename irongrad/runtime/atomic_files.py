"""Write a file so that a reader sees the old or the new one, whatever kills the writer."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from irongrad.runtime.abandoned import hold, remove_abandoned, unique

_TEMPORARY = ".tmp"
_LONGEST = 190


def atomic_write(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, and remove what killed writers of `path` left.

    A symbolic link is followed. A file that exists keeps its permissions; a new one gets those of any new file.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    path = Path(os.path.realpath(path))
    _refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(_beside(path), _TEMPORARY)
    temporary = _temporary(path)
    with _removed_after_errors(temporary), os.fdopen(_created(temporary), "wb") as file:
        with suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, path)
    _sync_directory(path.parent)


def link_or_copy(old: str | Path, new: str | Path) -> None:
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def atomic_link(old: Path, new: Path) -> None:
    """Make `new` a second name of the file `old`, in place of what `new` was; a copy where there are no hard links.

    A later `atomic_write` of `old` leaves `new` as it is.

    Raises:
        OSError: the name cannot be made; what it named is unchanged.
    """
    _refuse_special(new)
    remove_abandoned(_beside(new), _TEMPORARY)
    temporary = _temporary(new)
    with _removed_after_errors(temporary):
        link_or_copy(os.path.realpath(old), temporary)
        os.replace(temporary, new)
    _sync_directory(new.parent)


def check_writable(path: Path) -> None:
    """Check that `atomic_write` can write `path`, and make its directory.

    Raises:
        OSError: it cannot.
    """
    path = Path(os.path.realpath(path))
    _refuse_special(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    trial = _temporary(path)
    with _removed_after_errors(trial):
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with suppress(OSError):
            os.unlink(trial)


@contextmanager
def _removed_after_errors(temporary: Path) -> Iterator[None]:
    """Remove a temporary file if the block fails or is interrupted.

    The block makes the file: Ctrl-C may arrive as soon as it exists.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _refuse_special(path: Path) -> None:
    """Refuse a directory, a device or a pipe, which a rename would replace."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def _created(temporary: Path) -> int:
    """Make a temporary file, and hold its lock; return its handle."""
    while True:
        # The system applies the umask to the mode. `os.umask` reads it by setting it, for all threads.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if hold(handle, temporary):
            return handle
        os.close(handle)  # another writer took it for abandoned, before its lock was held


def _temporary(path: Path) -> Path:
    return path.with_name(f".{_beside(path).name}.{unique()}{_TEMPORARY}")


def _beside(path: Path) -> Path:
    """The path, with as much of its name as leaves room for the rest of a temporary's name: a name has 255 bytes."""
    name = path.name.encode(errors="surrogateescape")
    return path.with_name(name[:_LONGEST].decode(errors="ignore")) if len(name) > _LONGEST else path


def _sync_directory(directory: Path) -> None:
    """Make the rename itself survive a power failure; does nothing where directories cannot be opened."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
