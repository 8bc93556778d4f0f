"""Stacks of the threads that run kernels."""

from __future__ import annotations

import functools

import iree.runtime as ireert

# IREE 3.13.0 gives the workers of local-task 128 KiB (runtime/src/iree/task/api.c). One kernel may ask for as much, and
# LLVM keeps on the stack, too, what is in no register: a product of 200 rows with a GELU after it, in tiles of 16 by 16
# for AVX-512, ends the process with a segmentation fault. Only pages that are used take memory.
WORKER_STACK = f"--task_worker_stack_size={2 << 20}"


@functools.cache
def give_workers_stack() -> None:
    """Have devices that are opened from now on give their threads enough."""
    ireert.flags.parse_flags(WORKER_STACK)
