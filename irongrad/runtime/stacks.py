"""The stack size of the threads that run kernels."""

from __future__ import annotations

import functools

import iree.runtime as ireert

# IREE 3.13.0 gives the workers of local-task 128 KiB of stack (runtime/src/iree/task/api.c). One kernel may ask for all
# of it, and LLVM also spills registers to the stack. A product of 200 rows with a GELU after it, in tiles of 16 by 16
# for AVX-512, then ends the process with a segmentation fault. Only pages that are used take memory.
WORKER_STACK = f"--task_worker_stack_size={2 << 20}"


@functools.cache
def give_workers_stack() -> None:
    """Give the threads of all devices that are opened from now on a stack of 2 MiB."""
    ireert.flags.parse_flags(WORKER_STACK)
