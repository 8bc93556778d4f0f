"""Which rank holds which shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from irongrad.runtime.ranks.owners import owners


@given(st.lists(st.integers(1, 10**9), max_size=60), st.integers(1, 9))
def test_no_rank_holds_much_more_than_its_part(sizes: list[int], ranks: int) -> None:
    found = owners(sizes, ranks)
    held = [sum(s for s, r in zip(sizes, found, strict=True) if r == rank) for rank in range(ranks)]
    assert sum(held) == sum(sizes)
    # Without the shard that came last, the rank that holds the most held at most the mean.
    assert max(held) <= sum(sizes) / ranks + max(sizes, default=0)


def test_the_largest_goes_first() -> None:
    assert owners([1, 5, 3, 4], 2) == [0, 0, 1, 1]
    assert owners([7, 7], 4) == [0, 1]
    assert owners([], 3) == []
