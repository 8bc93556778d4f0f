"""Call a function of a module: the thread that waits for the result does not hold up the threads that compute it.

IREE 3.13.0's `iree_async_semaphore_multi_wait` wakes the waiting thread, and only then marks the wait as completed. The
thread that waited spins until it sees the mark. If Linux runs it in place of the worker that was about to write the
mark, because all other cores are busy, it spins until its time slice is over: 4 ms that count double, as the worker
waits for them. On two cores every second step pays that, on one core every step. A thread of the policy SCHED_BATCH is
never run in place of one that runs, so a thread takes this policy for the time of a call. Not covered: a worker
whose time slice ends between the two, where other processes keep its core busy; a thread with a policy of its own
choice, such as SCHED_FIFO; and programs that call IREE themselves, such as iree-run-module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# local-sync computes in the thread that calls it; other drivers do not compute on this machine's cores.
_DRIVER_WITH_WORKERS = "local-task"


def invoke(context: Any, driver: str, function: Any, arguments: Any, results: Any) -> None:
    """Run a function of a module in this thread, which waits for the device.

    Args:
        context: IREE's VmContext.
        driver: the driver of the device that computes.
        function: IREE's VmFunction.
        arguments: a VmVariantList of its arguments.
        results: a VmVariantList, to which the results are added.

    Raises:
        Exception: what IREE raises, when the function fails.
    """
    if driver != _DRIVER_WITH_WORKERS:
        context.invoke(function, arguments, results)
        return
    with _as_batch():
        context.invoke(function, arguments, results)


@contextmanager
def _as_batch() -> Iterator[None]:
    """Give this thread the policy SCHED_BATCH (sched(7)), if it has the usual one and the system has both."""
    changed = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER and _take(os.SCHED_BATCH)
    try:
        yield
    finally:
        if changed:
            _take(os.SCHED_OTHER)


def _take(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:  # a sandbox may forbid it
        return False
    return True
