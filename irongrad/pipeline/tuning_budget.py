"""The time that `--tune` may measure, with its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class TuningBudget:
    """How long `--tune` may measure, and how much it has measured. A measurement that has begun is finished.

    Attributes:
        seconds: the budget in seconds.
        show: called before each measurement, with a description of the computation and the progress.
        spent: the seconds that measurements took.
        expected: the measurements that were announced.
        timed: the measurements that were made.
        known: the measurements that earlier runs made.
        left_out: the measurements for which no time was left.
    """

    seconds: float
    show: Callable[[str], None] = lambda text: None
    spent: float = 0.0
    expected: int = 0
    timed: int = 0
    known: int = 0
    left_out: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether no time is left."""
        return self.spent >= self.seconds

    @contextmanager
    def measuring(self, what: str, count: int = 1) -> Iterator[None]:
        """While open, the time counts; `count` measurements are made at once."""
        self.show(f"{what} ({self._progress()})")
        start = time.perf_counter()
        yield
        self.spent += time.perf_counter() - start
        self.timed += count

    def _progress(self) -> str:
        done = self.timed + self.known + self.left_out
        said = f"{done + 1} of {max(self.expected, done + 1)}, {self.spent:.0f} of {self.seconds:.0f} s"
        if not self.timed:
            return said
        left = min(self.spent / self.timed * (self.expected - done), self.seconds - self.spent)
        return f"{said}, at most {max(left, 0):.0f} s left"
