"""What this machine's CPU can do at most: arithmetic by a product or by multiply-adds, memory bandwidth by a copy."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from irongrad.analysis.other_work import OtherWork

_SIZE = 2048  # of the product: 17 GFLOP, and three matrices of 16 MiB
_BYTES = 1 << 28  # of the copy: larger than the caches of common CPUs
_REPETITIONS = 7


@dataclass(frozen=True)
class Machine:
    """A measured CPU.

    Attributes:
        name: its name, as the operating system tells it.
        threads: the number of threads that this process may use.
        flops: float32 operations a second: of a product of two 2048 x 2048 matrices by numpy's BLAS, or of a compiled
            loop of multiply-adds, whichever are more.
        bandwidth: bytes a second that a copy of 256 MiB reads and writes, with all threads.
        others: the share of all CPUs that other processes took meanwhile, from 0 to 1; None if unknown.
    """

    name: str
    threads: int
    flops: float
    bandwidth: float
    others: float | None = None

    @property
    def ridge(self) -> float:
        """The arithmetic intensity at which the two limits meet, in operations for each byte."""
        return self.flops / self.bandwidth

    def seconds(self, operations: int, nbytes: int) -> float:
        """The least time that so much work takes (Williams, Waterman and Patterson, "Roofline", CACM 2009)."""
        return max(operations / self.flops, nbytes / self.bandwidth)

    def bound(self, operations: int, nbytes: int) -> str:
        """What gives the least time of so much work: `arithmetic` or `memory`."""
        return "arithmetic" if operations / self.flops > nbytes / self.bandwidth else "memory"

    def attainable(self, intensity: float) -> float:
        """The most operations a second at an arithmetic intensity."""
        return min(self.flops, intensity * self.bandwidth)


def measured_machine(arithmetic: Callable[[], float]) -> Machine:
    """Measure this machine, in about three seconds; the best of several runs counts.

    Args:
        arithmetic: another measure of its operations a second, for CPUs that numpy's BLAS does not use well.
    """
    others = OtherWork()
    return Machine(cpu_name(), threads(), max(_product(), arithmetic()), _copy(), others.share())


def threads() -> int:
    """The number of threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The CPU's name, as the operating system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _product() -> float:
    left, right = (np.random.default_rng(i).random((_SIZE, _SIZE), np.float32) for i in range(2))
    out = np.empty_like(left)
    return 2 * _SIZE**3 / _least(lambda: np.matmul(left, right, out=out))


def _copy() -> float:
    count = threads()
    source = np.ones((count, _BYTES // count), np.uint8)
    into = np.zeros_like(source)
    with ThreadPoolExecutor(count) as pool:  # numpy copies without Python's lock
        least = _least(lambda: list(pool.map(np.copyto, into, source)))
    return 2 * source.nbytes / least


def _least(run: Callable[[], object]) -> float:
    """The least seconds of several runs; the first run touches the memory, and does not count."""
    run()
    found = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
