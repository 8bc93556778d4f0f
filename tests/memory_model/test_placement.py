"""Placement of values in one allocation."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from irongrad.memory_model import placement
from irongrad.memory_model.placement import ALIGNMENT, Placement, Span, aligned, most_at_once, place

spans = st.lists(
    st.builds(
        lambda size, start, length: Span(size, start, start + length),
        st.integers(1, 2000),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=25,
)


def test_no_values_take_no_memory():
    assert place([]) == Placement((), 0)


@given(spans)
def test_values_that_are_live_at_the_same_time_do_not_overlap(items):
    made = place(items)
    for (a, at), (b, there) in combinations(list(zip(items, made.offsets, strict=True)), 2):
        if a.start <= b.end and b.start <= a.end:
            assert at + a.bytes <= there or there + b.bytes <= at
    assert all(offset % ALIGNMENT == 0 for offset in made.offsets)
    ends = [offset + aligned(item.bytes) for item, offset in zip(items, made.offsets, strict=True)]
    assert made.total == max(ends, default=0)


@given(spans)
def test_the_total_is_between_the_peak_and_the_sum_of_all_sizes(items):
    assert most_at_once(items) <= place(items).total <= sum(aligned(i.bytes) for i in items)


def test_an_earlier_small_value_does_not_split_the_memory_of_large_ones():
    """Placed in the order of their writes, the small value would split the memory that the last value needs."""
    items = [Span(640, 0, 1), Span(64, 1, 3), Span(640, 2, 3), Span(1280, 4, 4), Span(64, 3, 4)]
    assert place(items).total == most_at_once(items) == 1344


@given(spans)
def test_thousands_of_values_are_placed_as_few_are(items):
    few = place(items)
    with mock.patch.object(placement, "_FEW", 0):
        assert place(items) == few
