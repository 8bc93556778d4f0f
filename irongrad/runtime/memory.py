"""Tune glibc's malloc: keep the memory of one step for the next step, on large pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

# glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Make malloc keep large freed blocks instead of returning them to the system; does nothing without glibc.

    IREE 3.13.0 allocates the intermediate values of a call anew in every call. Blocks over 64 MiB come straight from
    malloc (its local_task/task_device.c). glibc maps blocks over 32 MiB when they are allocated, and unmaps them when
    they are freed. The system then clears every page again in every step: a quarter of the time of a GPT's step on two
    cores. With this setting the memory of a process stays at its peak, as with PyTorch's allocator for GPUs.

    If this is called before other threads exist, all threads share one arena, so each reuses memory that another has
    freed. IREE's workers allocate large blocks too. A block that is too large for a thread's own arena is mapped each
    time (sysmalloc of glibc 2.36).
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_ARENA_MAX, 1)


def prefer_large_pages(size: int) -> None:
    """Place the next `size` bytes from malloc on pages of 2 MiB, if Linux leaves that choice to processes.

    With 4 KiB pages, a matrix product that reads rows of a megabyte keeps the processor walking page tables, twice in a
    virtual machine. Steps of a GPT, an MoE and a ResNet-18 take 0.93 of the time on large pages. The memory is reserved
    but not touched. On other systems, or if there is not that much memory, nothing happens.

    What malloc has given out and nobody has touched comes to lie on large pages, too: the pool of 64 MiB that IREE's
    local-task makes when it is opened. Call this after that. calloc clears memory which malloc has given out before, so
    the pool would otherwise take all of it for itself, and touch every page.

    Source: madvise(2), and the kernel's Documentation/admin-guide/mm/transhuge.rst.
    """
    if (libc := _glibc()) is not None:
        block = _on_large_pages(libc, size)
        for start, length in _heap():
            libc.madvise(start, length, mmap.MADV_HUGEPAGE)
        libc.free(block)


def clear_early(size: int) -> None:
    """Make the system clear now, on large pages, `size` bytes that malloc gives later; does nothing without glibc.

    The system clears a new page when a process first writes it, one page after the other. This takes 0.4 to 2.4 s a
    gigabyte on virtual machines, because the host clears the page too. Clearing early only works after
    `keep_freed_memory`.
    """
    if (libc := _glibc()) is not None and (block := _on_large_pages(libc, size)) is not None:
        ctypes.memset(block, 0, size)
        libc.free(block)


def _on_large_pages(libc: ctypes.CDLL, size: int) -> int | None:
    """Allocate `size` bytes, on pages of 2 MiB as far as there are any; None if there is not enough memory."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free.argtypes = [ctypes.c_void_p]
    block: int | None = libc.malloc(size)
    if block is not None:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(first, max(block + size - first, 0), mmap.MADV_HUGEPAGE)
    return block


def _heap() -> list[tuple[int, int]]:
    """The start and the length of each mapping of the heap of malloc's main arena."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    ranges = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return [(int(start, 16), int(end, 16) - int(start, 16)) for start, end in ranges]


def _glibc() -> ctypes.CDLL | None:
    """Return a handle of this process's C library, with argument types of its own; None if it is not glibc."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
