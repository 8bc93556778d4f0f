"""Which rank holds which shard of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.runtime.manifest import Manifest
from irongrad.runtime.tensor_sizes import size_of


def shard_sizes(manifest: Manifest) -> list[int]:
    """The bytes of each shard of an artifact."""
    sizes = {s.name: size_of(s) for s in manifest.state}
    return [sum(sizes[name] for name in shard) for shard in manifest.shards]


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that holds each shard: the largest shard goes first, to the rank that holds the least so far.

    The largest share is at most a third larger than the best division allows (Graham, "Bounds on multiprocessing timing
    anomalies", 1969).

    Args:
        sizes: the bytes of each shard.
        ranks: the number of ranks.
    """
    held, found = [0] * ranks, [0] * len(sizes)
    for shard in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found[shard] = held.index(min(held))
        held[found[shard]] += sizes[shard]
    return found
