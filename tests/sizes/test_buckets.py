"""The choice of buckets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.runtime.errors import UserError
from irongrad.sizes.buckets import combinations, smallest


def test_pow2_lists_powers_of_two_up_to_the_limit():
    assert ig.pow2(1, 8) == [1, 2, 4, 8]
    assert ig.pow2(16, 100) == [16, 32, 64, 100]
    assert ig.pow2(5, 5) == [5]
    with pytest.raises(UserError, match=r"pow2\(8, 4\)"):
        ig.pow2(8, 4)


def test_combinations_come_smallest_first():
    made = combinations({"B": [4, 8], "T": [16, 2]})
    assert made == ({"B": 4, "T": 2}, {"B": 8, "T": 2}, {"B": 4, "T": 16}, {"B": 8, "T": 16})
    assert combinations([{"B": 8}, {"B": 4}, {"B": 8}]) == ({"B": 4}, {"B": 8})
    assert smallest(made, {"B": 3, "T": 3}) == {"B": 4, "T": 16}
    assert smallest(made, {"B": 9, "T": 3}) is None


def _padding(lengths: list[int], sizes: tuple[int, ...]) -> int:
    return sum(min(s for s in sizes if s >= n) - n for n in lengths)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_chosen_sizes_waste_the_least(lengths: list[int], count: int):
    chosen = ig.choose_buckets(lengths, max_buckets=count)
    assert len(chosen) <= count
    others = itertools.combinations(sorted(set(lengths)), len(chosen))
    least = min(_padding(lengths, sizes) for sizes in others if sizes[-1] == max(lengths))
    padding = _padding(lengths, chosen)
    assert padding == least
    assert chosen.waste == pytest.approx(padding / (padding + sum(lengths)))


def test_the_fewest_sizes_within_a_waste_are_chosen():
    lengths = [1] * 50 + [10] * 30 + [12] * 20
    assert ig.choose_buckets(lengths, max_waste=0.2) == (1, 12)
    assert ig.choose_buckets(lengths, max_waste=0.0) == (1, 10, 12)
    table = str(ig.choose_buckets(lengths, max_buckets=2))
    assert table.splitlines()[0] == "sizes 1, 12"
    assert len(table.splitlines()) == 4


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(UserError, match="1 buckets waste 25.0%, more than max_waste 10.0%"):
        ig.choose_buckets([1, 2, 2, 1], max_buckets=1, max_waste=0.1)
    with pytest.raises(UserError, match="needs lengths"):
        ig.choose_buckets([])
    with pytest.raises(UserError, match="max_buckets is 0"):
        ig.choose_buckets([3], max_buckets=0)
