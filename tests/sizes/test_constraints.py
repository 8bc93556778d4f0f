"""The constraints on sizes that a user declares."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Mod

import irongrad as ig
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.constraints import conditions_of
from irongrad.sizes.expressions import symbol
from irongrad.sizes.limits import limits_of, limits_up_to, multiple_of, spelled

B, S, T = symbol("B"), symbol("S"), symbol("T")


def test_comparisons_become_relations_of_dimensions():
    assert conditions_of(["T % 8 == 0"], "T") == (sympy.Eq(Mod(T, 8), 0),)
    assert conditions_of(["16 <= T <= 512", "S < 2 * T - 1"], "ST") == (
        sympy.Le(16, T),
        sympy.Le(T, 512),
        sympy.Lt(S, 2 * T - 1),
    )
    assert conditions_of(["T >= 1 - 1"], "T") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("T", "no comparison of sizes, such as 'T % 8 == 0'"),
        ("T is 8", "no comparison"),
        ("T %", "no comparison"),
        ("U == 8", "names 'U', which is no dimension of dynamic: T"),
        ("T / 8 == 2", "'T / 8' in it"),
        ("T == 8.0", "'8.0' in it"),
        ("len(T) == 8", r"'len\(T\)' in it"),
        ("T < 0", "no sizes satisfy"),
    ],
)
def test_a_constraint_that_is_no_comparison_is_refused(text: str, reason: str):
    with pytest.raises(CaptureError, match=reason):
        conditions_of([text], ["T"])


def test_declared_relations_limit_the_sizes():
    declared = conditions_of(["T != 5", "T <= 9", "T % 2 == 1"], "T")
    limits = limits_up_to([sympy.Ne(T, 12)], {"T": 11}, declared)  # T != 12 is always true, as T is at most 11
    assert limits.largest == {"T": 9}
    assert [n for n in range(1, 12) if limits.allow({"T": n})] == [1, 3, 7, 9]


def test_a_remainder_of_a_negative_number_allows_no_size():
    """The gradient of `x.unfold(1, 3, 1)` divides by the number of windows."""
    limits = limits_of([sympy.Eq(Mod(8 * T - 16, T - 2), 0)], ["T"])
    assert limits.smallest == {"T": 3}
    assert limits.conditions == ()


def test_no_size_divides_by_zero():
    """A module that computes such a remainder ends the process."""
    limits = limits_of(conditions_of(["B % (T - 1) == 0", "S // (B - T) == 2"], "BST"), ["B", "S", "T"])
    assert limits.smallest == {"B": 1, "S": 1, "T": 2}
    assert limits.conditions[1] == sympy.Ne(B - T, 0)
    assert len(limits.conditions) == 3


def test_a_multiple_is_spelled_in_words():
    (condition,) = conditions_of(["T % 8 == 0"], "T")
    assert multiple_of(condition) == (T, 8)
    assert spelled(condition) == "T a multiple of 8"
    assert multiple_of(sympy.Eq(Mod(T, 8), 1)) is None


def test_an_example_must_satisfy_the_constraints():
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"have sizes \{'T': 6\}, which do not satisfy the constraint 'T % 4 == 0'"):
        ig.TrainStep(
            model,
            lambda out: out.square().mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"input": torch.randn(6, 4)},
            dynamic={"input": {0: "T"}},
            constraints=["T % 4 == 0"],
        )
