"""Elements of a parameter whose update rounding decides: judged by how far the step moves, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irongrad.runtime.golden import SAMPLE, Golden, kept, read_golden, write_golden
from irongrad.runtime.undecided import unforgiven
from irongrad.runtime.verification import error_of

LR = 1e-3
SMALL, LARGE, ZERO, BELOW = range(4)  # elements, by their gradient
GRADIENT = np.array([1e-7, 1.0, 0.0, -1e-6])


def golden(source: str = "gradient/0/w", size: int = 1) -> Golden:
    """One step of Adam from zero; the gradient, or a moment of it, has a tolerance of 1e-6."""
    moments = np.tile(GRADIENT, size)
    expected = {"state/1/w": -LR * np.sign(moments), source: moments}
    return Golden(1, "float64", {}, expected, {"state/1/w": 1e-6, source: 1e-6}, moves={"state/1/w": LR})


def off(element: int, by: float, size: int = 1) -> np.ndarray:
    value = golden(size=size).expected["state/1/w"].astype(np.float32)
    value[element::4] += np.float32(by)
    return value


@pytest.mark.parametrize("source", ["gradient/0/w", "state/1/optimizer/exp_avg/w"])
@pytest.mark.parametrize(("element", "right"), [(SMALL, True), (LARGE, False), (ZERO, False), (BELOW, True)])
@pytest.mark.parametrize("size", [1, SAMPLE])
def test_the_sign_of_a_gradient_that_is_zero_within_its_tolerance_is_open(
    source: str, element: int, right: bool, size: int
) -> None:
    of_artifact = kept(golden(source, size))
    error = error_of(of_artifact, "state/1/w", off(element, 2 * LR, size), of_artifact.expected["state/1/w"])
    assert (error <= 1e-6) == right
    assert right or error == pytest.approx(2 * LR)


@pytest.mark.parametrize("by", [3 * LR, -1.0, np.nan, np.inf])
def test_an_undecided_element_is_not_free(by: float) -> None:
    assert not error_of(golden(), "state/1/w", off(SMALL, by), golden().expected["state/1/w"]) <= 1e-6


def test_a_later_step_remembers() -> None:
    first = golden()
    expected = {**first.expected, "gradient/1/w": np.ones(4), "state/2/w": first.expected["state/1/w"]}
    later = replace(
        first,
        steps=2,
        expected=expected,
        allowed=dict.fromkeys(expected, 1e-06),
        moves={**first.moves, "state/2/w": LR},
    )
    difference = np.full(4, LR)
    assert unforgiven(later, "state/2/w", difference).tolist() == [0.0, LR, LR, 0.0]


def test_values_without_moves_are_judged_as_they_are() -> None:
    assert error_of(replace(golden(), moves={}), "state/1/w", off(SMALL, LR), golden().expected["state/1/w"]) > 1e-6


def test_moves_are_read_as_they_are_written(tmp_path) -> None:
    write_golden(golden(), tmp_path / "golden")
    assert read_golden(tmp_path / "golden").moves == golden().moves
