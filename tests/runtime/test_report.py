"""A report states how tight its tolerances are, and which values it cannot judge."""

from __future__ import annotations

import pytest

from irongrad.pipeline.verify_targets import check_report
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import Golden
from irongrad.runtime.report import Comparison, Report
from irongrad.runtime.verification import certificate

INFINITE = float("inf")


def of(*comparisons: Comparison) -> Report:
    return Report(comparisons, 1, "float64")


def one(key: str, error: float, allowed: float, magnitude: float = 1.0, elements: int = 1) -> Comparison:
    return Comparison("train_step", key, error, allowed, elements, magnitude)


def test_a_tolerance_as_large_as_the_value_cannot_be_judged() -> None:
    report = of(one("loss/0/", 0.1, 2.0), one("gradient/0/a", 0.1, 0.2), one("gradient/0/b", 0.0, INFINITE))
    assert report.unjudged_values == ("loss/0/", "gradient/0/b")
    assert report.passed
    assert certificate(report, "local-task").unjudged == ("loss/0/", "gradient/0/b")


def test_a_value_that_is_zero_but_for_rounding_is_judged_to_be_zero() -> None:
    report = of(one("gradient/0/a", 0.0, 1e-7, 2.0), one("gradient/0/b", 1e-9, 4e-9, 1e-9), one("state/1/n", 0, 0, 3))
    assert not report.unjudged
    exactly = of(one("gradient/0/a", 0.0, 1e-7, 2.0), one("gradient/0/b", 1e-4, 4e-4, 1e-17))
    assert not exactly.unjudged
    assert exactly.tightness.tolerance_largest == pytest.approx(0.02)
    assert of(one("gradient/0/a", 0.0, 1e-7, 2.0), one("gradient/0/b", 1e-2, 0.1, 1e-17)).unjudged
    moments = of(one("state/1/optimizer/square/a", 0.0, 1e-9, 1e-9), one("state/1/a", 0.0, 1e-7, 3.0))
    assert moments.unjudged_values == ("state/1/optimizer/square/a",)  # all values of this kind are as small


def test_a_check_without_an_oracle_is_judged() -> None:
    assert not of(Comparison("train_step, lr=0", "state/0/w", 0.0, 0.0)).unjudged


def test_tightness_counts_values_with_a_finite_tolerance() -> None:
    report = of(
        one("loss/0/", 0.1, 1.0, 10.0, 1),
        one("gradient/0/a", 0.1, 0.2, 10.0, 5),
        one("gradient/0/b", 0.9, 1.0, 2.0, 7),
        one("gradient/0/c", 0.0, INFINITE, 2.0, 4),
    )
    tight = report.tightness
    assert (tight.elements, tight.error_median, tight.error_largest) == (17, 0.5, 0.9)
    assert (tight.tolerance_median, tight.tolerance_largest) == (0.1, 0.5)
    assert of(one("gradient/0/c", 0.0, INFINITE)).tightness.error_largest == 0.0


GOLDEN = Golden(1, "float64", {}, {}, {})


def test_an_error_of_a_value_that_cannot_be_judged_is_no_bug() -> None:
    report = of(one("gradient/0/a", 3.0, 2.0), one("loss/0/", 0.1, 0.2))
    with pytest.raises(VerificationError, match="cannot be judged") as caught:
        check_report(report, GOLDEN)
    assert "gradient/0/a" in str(caught.value)
    assert "bug" not in str(caught.value)


def test_an_error_of_a_value_that_can_be_judged_is_a_bug() -> None:
    report = of(one("gradient/0/a", 3.0, 2.0), one("loss/0/", 0.3, 0.2))
    with pytest.raises(VerificationError, match="in 2 of 2 values") as caught:
        check_report(report, GOLDEN)
    assert "a bug in IronGrad" in str(caught.value)
