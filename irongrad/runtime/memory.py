"""Keeping the memory of one step for the next, on large pages."""

from __future__ import annotations

import ctypes
import mmap
import platform

# glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Have malloc keep large blocks that are freed, and not return them to the system; elsewhere than glibc, nothing.

    IREE 3.13.0 allocates what a call needs in between anew in every call; what is over 64 MiB comes straight from
    malloc (its local_task/task_device.c), and blocks over 32 MiB are mapped by glibc when they are allocated, and
    unmapped when freed. Every page is then cleared by the system again in every step: a quarter of the time of a GPT's
    step on two cores. The memory of a process stays at its peak, as it does with PyTorch's allocator for GPUs.

    What one thread frees is there for all, where this is called before there are others: IREE's workers allocate large
    blocks too, and one too large for the arena of a thread is mapped each time (sysmalloc of glibc 2.36).
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_ARENA_MAX, 1)


def prefer_large_pages(size: int) -> None:
    """Have `size` bytes that malloc gives next lie on pages of 2 MiB, where Linux leaves that to processes.

    With pages of 4 KiB a product that reads rows of a megabyte has the processor look pages up all the time, and twice
    in a virtual machine. Steps of a GPT, an MoE and a ResNet-18 take 0.93 of the time on large pages. Memory is set
    aside, and none of it touched. Elsewhere, and where there is not as much, nothing happens.

    Source: madvise(2) and the kernel's Documentation/admin-guide/mm/transhuge.rst.
    """
    if (libc := _glibc()) is not None:
        libc.free(_on_large_pages(libc, size))


def clear_early(size: int) -> None:
    """Have the system clear `size` bytes now, on large pages, that malloc gives later; elsewhere than glibc, nothing.

    What a process has not used before is cleared when it is first written, one page after the other: 0.4 to 2.4 s a
    gigabyte on virtual machines, as the host clears it too. It takes effect after `keep_freed_memory`.
    """
    if (libc := _glibc()) is not None and (block := _on_large_pages(libc, size)) is not None:
        ctypes.memset(block, 0, size)
        libc.free(block)


def _on_large_pages(libc: ctypes.CDLL, size: int) -> int | None:
    """Memory from malloc on pages of 2 MiB as far as there are any; None where there is no memory."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free.argtypes = [ctypes.c_void_p]
    block: int | None = libc.malloc(size)
    if block is not None:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(first, max(block + size - first, 0), mmap.MADV_HUGEPAGE)
    return block


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, with types of its own; None where it is no glibc."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
