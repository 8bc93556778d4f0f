"""Exchange two directories in one step of the file system."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

_HERE = -100  # AT_FDCWD of Linux: paths count from the working directory
_RENAME_EXCHANGE = 2  # renameat2(2), Linux 3.15
_RENAME_SWAP = 2  # renamex_np(2), macOS 10.12
# What a file system answers that cannot exchange (EXDEV: overlayfs, for a directory of a lower layer), or a system that
# does not know the call.
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system; return False if it cannot.

    Raises:
        OSError: a path does not exist, or may not be renamed.
    """
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    first, second = os.fsencode(one), os.fsencode(other)
    if platform.system() == "Linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_HERE, first, _HERE, second, _RENAME_EXCHANGE)  # type: ignore[union-attr]
    elif platform.system() == "Darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(first, second, _RENAME_SWAP)  # type: ignore[union-attr]
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
