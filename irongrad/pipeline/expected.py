"""Expected values whose allowed errors come of as many runs as it takes to know that a compiled program is right.

What is allowed of a value grows with the largest error of several eager runs (`irongrad.tolerance`). A further run can
only make it larger, so a program that is right by the first few is right by all, and one that is wrong by all is wrong
by the first few: the verdict does not depend on how many of them were made before it was clear, nor on their order.
One run in place of seven is enough for nearly every program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from irongrad.runtime.golden import Golden
from irongrad.runtime.session import Session
from irongrad.runtime.verification import Report, verify
from irongrad.tolerance import SETTLED


class Expected:
    """Golden values, with what the runs so far allow.

    Attributes:
        golden: the values.
    """

    def __init__(self, runs: Iterator[Golden]) -> None:
        """`runs` gives the same values once after each run, each time with larger allowed errors, or the same."""
        self._runs = runs
        self.golden = next(runs)

    def widen(self) -> bool:
        """Make one more run; False where all were made."""
        wider = next(self._runs, None)
        if wider is None:
            return False
        self.golden = wider
        return True

    def widest(self) -> Golden:
        """The values with what all runs allow."""
        while self.widen():
            pass
        return self.golden


def verify_against(session: Session, expected: Expected) -> Report:
    """Compare with `expected`, after as many runs as the errors found take."""
    report = verify(session, expected.golden)
    while report.worst.ratio > SETTLED and expected.widen():
        allowed = expected.golden.allowed
        report = replace(report, comparisons=tuple(replace(c, allowed=allowed[c.key]) for c in report.comparisons))
    return report
