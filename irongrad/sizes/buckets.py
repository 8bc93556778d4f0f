"""Buckets: the fixed sizes for which a step with dynamic dimensions is compiled, of all of them or of some."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from irongrad.runtime.errors import CaptureError, UserError

# Sizes by named dimension; dimensions without a size in it are open (`irongrad.sizes.open`).
Bucket = Mapping[str, int]


def pow2(smallest: int, largest: int) -> list[int]:
    """The powers of two from `smallest` to `largest`; the last size is always `largest`, even if it is no power of two.

    Raises:
        UserError: `smallest` is not positive, or is larger than `largest`.
    """
    if not 0 < smallest <= largest:
        raise UserError(f"pow2({smallest}, {largest}): the sizes must be positive, the smallest first")
    powers = [1 << n for n in range(largest.bit_length()) if smallest <= 1 << n < largest]
    return [*powers, largest]


class ChosenBuckets(tuple[int, ...]):
    """The sizes that `choose_buckets` chose, smallest first; they print with a table of the waste by number of buckets.

    Attributes:
        wastes: the fraction of the computed elements that is padding, for the best 1, 2, … sizes.
    """

    wastes: tuple[float, ...]

    @property
    def waste(self) -> float:
        """The fraction of the computed elements that is padding, for these sizes."""
        return self.wastes[len(self) - 1]

    def __str__(self) -> str:
        rows = [f"{count:>7}  {waste:>6.1%}" for count, waste in enumerate(self.wastes, 1)]
        return "\n".join([f"sizes {', '.join(map(str, self))}", "buckets  waste", *rows])


def choose_buckets(
    lengths: Iterable[int], *, max_buckets: int | None = None, max_waste: float | None = None
) -> ChosenBuckets:
    """The sizes of one dimension for which inputs of these `lengths` need the least padding.

    Every length runs in the smallest size that holds it. Dynamic programming over the distinct lengths finds the
    optimum, because the best size of a bucket is always the largest length in it.

    Args:
        lengths: the lengths of the real inputs, each as often as it occurs.
        max_buckets: the largest number of sizes; 8 unless `max_waste` is given.
        max_waste: the largest fraction of the computed elements that may be padding. The fewest sizes that keep to it
            are chosen.

    Raises:
        UserError: there are no lengths, a length is below 1, or the limits cannot be met.
    """
    values, counts = np.unique(np.asarray(list(lengths), dtype=np.int64), return_counts=True)
    if not len(values) or values[0] < 1:
        raise UserError("choose_buckets needs lengths, each of them at least 1")
    most = min(len(values), max_buckets if max_buckets is not None else (8 if max_waste is None else len(values)))
    if most < 1:
        raise UserError(f"max_buckets is {max_buckets}; it must be at least 1")
    padding, cuts = _least_padding(values, counts, most)
    true = int((values * counts).sum())
    wastes = tuple(float(p / (p + true)) for p in padding)
    enough = [n for n, waste in enumerate(wastes, 1) if max_waste is None or waste <= max_waste]
    if not enough:
        raise UserError(
            f"{most} buckets waste {wastes[-1]:.1%}, more than max_waste {max_waste:.1%}; allow more buckets"
        )
    chosen = ChosenBuckets(_sizes(values, cuts, enough[0] if max_waste is not None else most))
    chosen.wastes = wastes
    return chosen


def _least_padding(values: Any, counts: Any, most: int) -> tuple[list[int], list[Any]]:
    """The least padding with 1 to `most` sizes, and for each number of sizes where the last bucket of a prefix begins.

    `cost[i, j]` is the padding if lengths i to j share one bucket. A prefix in n buckets is a shorter prefix in n - 1
    buckets, and one more bucket.
    """
    number = np.concatenate([[0], np.cumsum(counts)])
    total = np.concatenate([[0], np.cumsum(values * counts)])
    cost = values[None, :] * (number[None, 1:] - number[:-1, None]) - (total[None, 1:] - total[:-1, None])
    cost = np.where(np.tri(len(values), k=-1, dtype=bool), np.iinfo(np.int64).max // 2, cost)
    best = cost[0]
    padding, cuts = [int(best[-1])], [np.zeros(len(values), np.int64)]
    for _ in range(1, most):
        before = np.concatenate([[np.iinfo(np.int64).max // 2], best[:-1]])
        sums = before[:, None] + cost
        cuts.append(sums.argmin(0))
        best = sums.min(0)
        padding.append(int(best[-1]))
    return padding, cuts


def _sizes(values: Any, cuts: Sequence[Any], count: int) -> list[int]:
    """The largest length of every bucket."""
    sizes: list[int] = []
    last = len(values) - 1
    for number in reversed(range(count)):
        sizes.insert(0, int(values[last]))
        last = int(cuts[number][last]) - 1
    return sizes


def combinations(buckets: Mapping[str, Sequence[int]] | Sequence[Bucket]) -> tuple[Bucket, ...]:
    """All buckets, in order of their numbers of elements, smallest first.

    Args:
        buckets: sizes by dimension, every combination of which is a bucket; or a list of such combinations.
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


def check_sizes(buckets: Sequence[Bucket], dimensions: Collection[str]) -> None:
    """Refuse buckets that are no sizes of `dimensions`, or that name different ones.

    Raises:
        CaptureError: there is such a bucket.
    """
    for bucket in buckets:
        if not bucket or not set(bucket) <= set(dimensions) or not all(map(_is_size, bucket.values())):
            raise CaptureError(
                f"bucket {dict(bucket)} is not a positive size for one or more of {sorted(dimensions)}, the dimensions "
                "of dynamic"
            )
        if set(bucket) != set(buckets[0]):
            raise CaptureError(
                f"the buckets {dict(buckets[0])} and {dict(bucket)} name different dimensions. Every bucket must give "
                "sizes for the same ones; the others have any size in all of them"
            )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and size > 0


def open_dimensions(dynamic: Mapping[str, Mapping[int, str]], bucket: Bucket) -> tuple[str, ...]:
    """The dimensions that `bucket` gives no size for, so that they have any size in it.

    Args:
        dynamic: names of dimensions, by the input's name and the dimension's position.
        bucket: one of the step's buckets; all of them name the same dimensions.
    """
    return tuple(dict.fromkeys(name for dims in dynamic.values() for name in dims.values() if name not in bucket))


def smallest(buckets: Sequence[Bucket], sizes: Bucket) -> Bucket | None:
    """The first of `buckets` that holds `sizes`; None if none does."""
    return next((b for b in buckets if all(sizes[n] <= b[n] for n in b)), None)
