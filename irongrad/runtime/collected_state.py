"""Collect a state of which each rank holds a part: one tensor after the other, so that a rank needs little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.manifest import EntryPoint, Manifest, TensorSpec
from irongrad.runtime.safetensors_file import numpy_dtype

if TYPE_CHECKING:
    from irongrad.runtime.module import Module

# The function of a module that returns the state which every rank holds.
REST = "ranks.rest"


def shard_entry(number: int) -> str:
    """The name of the function that returns a shard of the state, on the rank that holds it."""
    return f"ranks.shard.{number}"


def collected(module: Module, manifest: Manifest, *, shards: bool = True) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of the state, with its name; all ranks call this.

    Args:
        module: the module, which is attached to ranks.
        manifest: its manifest.
        shards: whether the state that is divided among ranks is wanted, too.

    Raises:
        GuardError: another rank makes another call.
        RankLostError: a rank is gone.
    """
    exchange = module.exchange
    assert exchange is not None
    divided = {name for shard in manifest.shards for name in shard}
    kept = {s.name for s in manifest.in_base}
    specs = {s.name: TensorSpec(s.name, s.dtype, s.shape) for s in manifest.state if s.name not in kept}
    with module.lock:
        if shards:
            exchange.meet("state")
        rest = [spec for name, spec in specs.items() if name not in divided]
        yield from zip((s.name for s in rest), module.call(_entry(REST, rest), []), strict=True)
        for number, names in enumerate(manifest.shards if shards else ()):
            yield from _shard(module, number, [specs[name] for name in names])


def _shard(module: Module, number: int, specs: list[TensorSpec]) -> Iterator[tuple[str, Array]]:
    exchange = module.exchange
    assert exchange is not None
    root, ranks = exchange.owners[number], exchange.communicator
    mine = module.call(_entry(shard_entry(number), specs), []) if root == ranks.rank else None
    for i, spec in enumerate(specs):
        array = np.empty(tuple(map(int, spec.shape)), numpy_dtype(spec.dtype)) if mine is None else mine[i]
        ranks.broadcast(array.reshape(-1).view(np.uint8), root)
        yield spec.name, array


def _entry(name: str, outputs: list[TensorSpec]) -> EntryPoint:
    return EntryPoint(name, (), (), tuple(outputs), "A part of the state.")
