"""Expected values, with tolerances from as few eager runs as settle the verdict.

The tolerance of a value grows with the largest error of several eager runs (`irongrad.runtime.tolerance`). A further
run can only widen it. So a program that passes after the first few runs passes after all runs. A program that fails
after all runs fails after any of them. The verdict is that of all runs, however few are made and in whatever order.

Fewer runs with a larger factor would not do. The gradient of an element may be zero but for rounding, or a router may
be at a tie. In both cases the errors differ by factors of ten to a thousand between runs. In 27 steps, the tolerances
of one run were 0.85 of the tolerances of all runs at the median, and a thousandth of them at the smallest.

Tolerances from few runs would also refuse one in 200 correct programs. This was measured on 16,000 pairs of programs
that round differently: the first settled the tolerances, and the second was held to them. With all runs, none was
refused. So all runs are made for a device whose errors are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from irongrad.runtime.golden import Golden
from irongrad.runtime.report import Report
from irongrad.runtime.session import Session
from irongrad.runtime.tolerance import SETTLED
from irongrad.runtime.verification import alternating_steps, golden_steps


class Expected:
    """Golden values, with the tolerances of the runs so far.

    Attributes:
        golden: the values and their tolerances.
    """

    def __init__(self, runs: Iterator[Golden]) -> None:
        """Make the first run; `runs` yields the same values after each run, with tolerances that never shrink."""
        self._runs = runs
        self.golden = next(runs)

    def widen(self) -> bool:
        """Make one more run; return False if all runs were made before."""
        wider = next(self._runs, None)
        if wider is None:
            return False
        self.golden = wider
        return True

    def renamed(self, rename: Callable[[Golden], Golden]) -> Expected:
        """The same values as `rename` returns them, before the first comparison."""
        return Expected(chain([rename(self.golden)], map(rename, self._runs)))

    def widest(self) -> Golden:
        """Make all runs, and return the values with the tolerances of all."""
        while self.widen():
            pass
        return self.golden


@dataclass(frozen=True)
class ExpectedAtSizes:
    """The expected values of all functions of a step.

    Attributes:
        own: the values at the sizes of the example.
        others: the values at the sizes of each other bucket, and for any-size functions, and those of chosen steps.
        skipped: the chosen steps that eager does not survive, each with the reason.
    """

    own: Expected
    others: tuple[Expected, ...] = ()
    skipped: tuple[str, ...] = ()

    def renamed(self, rename: Callable[[Golden], Golden]) -> ExpectedAtSizes:
        """The same values, each set as `rename` returns it."""
        own, *others = (value.renamed(rename) for value in (self.own, *self.others))
        return replace(self, own=own, others=tuple(others))


def verify_against(session: Session, expected: Expected) -> Report:
    """Compare the values of a session that was loaded from the artifact alone with `expected`.

    Further runs are made until the verdict is settled.
    """
    golden = expected.golden
    report = alternating_steps(session, golden) if golden.order else golden_steps(session, golden, is_fresh=True)
    while report.comparisons and report.worst.ratio > SETTLED and expected.widen():
        allowed = expected.golden.allowed
        report = replace(
            report, comparisons=tuple(replace(c, allowed=allowed.get(c.key, c.allowed)) for c in report.comparisons)
        )
    return report
