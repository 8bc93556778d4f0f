"""Buckets: the fixed sizes that a step with dynamic dimensions is compiled for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from irongrad.runtime.errors import UserError

# Sizes by named dimension.
Bucket = Mapping[str, int]


def pow2(smallest: int, largest: int) -> list[int]:
    """Powers of two from `smallest` up, the last of them `largest` itself, a power of two or not."""
    if not 0 < smallest <= largest:
        raise UserError(f"pow2({smallest}, {largest}): the sizes must be positive, the smallest first")
    powers = [1 << n for n in range(largest.bit_length()) if smallest <= 1 << n < largest]
    return [*powers, largest]


def combinations(buckets: Mapping[str, Sequence[int]] | Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Every bucket, from the one with the fewest elements to that with the most.

    Args:
        buckets: sizes by dimension, of which every combination is a bucket; or the combinations themselves.
    """
    if isinstance(buckets, Mapping):
        chosen: list[Bucket] = [
            dict(zip(buckets, sizes, strict=True)) for sizes in itertools.product(*buckets.values())
        ]
    else:
        chosen = [dict(bucket) for bucket in buckets]
    unique = {tuple(sorted(bucket.items())): bucket for bucket in chosen}
    return tuple(sorted(unique.values(), key=_elements))


def _elements(bucket: Bucket) -> tuple[int, tuple[int, ...]]:
    product = 1
    for size in bucket.values():
        product *= size
    return product, tuple(bucket.values())


def smallest(buckets: Sequence[Bucket], sizes: Bucket) -> Bucket | None:
    """The first of `buckets` that `sizes` fit into."""
    return next((b for b in buckets if all(sizes[n] <= b[n] for n in b)), None)
