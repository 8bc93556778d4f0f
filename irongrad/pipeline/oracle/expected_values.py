"""Expected values whose allowed errors come of as many runs as it takes to know that a compiled program is right.

What is allowed of a value grows with the largest error of several eager runs (`irongrad.runtime.tolerance`). A further
run can only make it larger, so a program that is right by the first few is right by all, and one that is wrong by all
is wrong by any: the verdict is that of all runs, however few were made before it was clear, and in whatever order.

Fewer runs and a larger factor in their place would not do. An element whose gradient is zero but for rounding, or a
router at a tie, has errors that differ by factors of ten to a thousand between runs: in 27 steps the bounds of one run
were 0.85 of those of all at the median, and down to a thousandth. They would also refuse one in 200 programs that are
right (16,000 pairs of programs that round otherwise, the one settled first and the other held to the bounds that left;
none with all runs). So where the numbers of a device are not known here, all runs are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from irongrad.runtime.golden import Golden
from irongrad.runtime.session import Session
from irongrad.runtime.tolerance import SETTLED
from irongrad.runtime.verification import Report, golden_steps


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


@dataclass(frozen=True)
class ExpectedAtSizes:
    """What is expected of all functions of a step.

    Attributes:
        own: at the sizes of the example.
        others: at those of each other bucket, and of functions of any size.
    """

    own: Expected
    others: tuple[Expected, ...] = ()


def verify_against(session: Session, expected: Expected) -> Report:
    """Compare with `expected`, after as many runs as the errors found take."""
    report = golden_steps(session, expected.golden)
    while report.worst.ratio > SETTLED and expected.widen():
        allowed = expected.golden.allowed
        report = replace(report, comparisons=tuple(replace(c, allowed=allowed[c.key]) for c in report.comparisons))
    return report
