"""Conditions on sizes in messages."""

from __future__ import annotations

import sympy

from irongrad.sizes.asked import listed

T, B = sympy.symbols("T B", integer=True, positive=True)


def test_of_the_lower_bounds_of_a_size_the_strongest_is_listed() -> None:
    assert listed([T > 2, sympy.Eq(B, 4), T > 9, T > 3, B > 1]) == "T > 9, Eq(B, 4), B > 1"


def test_other_conditions_are_listed_as_they_are() -> None:
    assert listed([T > B, T < 5, T < 4, 2 * T > 3]) == "T > B, T < 5, T < 4, 2*T > 3"
