"""Changes of parameters in fewer bytes, with error feedback.

What rounding takes away from a change is added to the next one, so that nothing is lost in the long run: Seide et al.,
"1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.ranks.communicator import Communicator

_BLOCK = 1024  # elements that share a scale


class Sum(Protocol):
    """Sums a change over all ranks.

    Attributes:
        nbytes: the bytes that this rank has handed over.
    """

    nbytes: int

    def __call__(self, ranks: Communicator, change: Array) -> Array:
        """Return the sum of `change`, float32 of rank 1, over all ranks; equal on all of them."""


class Exact:
    """Sums in float32."""

    nbytes = 0

    def __call__(self, ranks: Communicator, change: Array) -> Array:
        """See `Sum`."""
        total = change.copy()
        request = ranks.start_sum(total)
        ranks.wait(request)
        self.nbytes += total.nbytes
        return total


class Rounded:
    """Sums changes that each rank rounds to `bfloat16`, or to 8-bit integers with a scale for each 1,024 of them."""

    def __init__(self, form: str) -> None:
        """
        Args:
            form: `bf16` or `int8`.
        """
        self.nbytes = 0
        self._pack, self._unpack = {"bf16": (_to_bf16, _from_bf16), "int8": (_to_int8, _from_int8)}[form]
        self._lost: Array | None = None

    def __call__(self, ranks: Communicator, change: Array) -> Array:
        """See `Sum`."""
        wanted = change if self._lost is None else change + self._lost
        packed = self._pack(wanted)
        self._lost = wanted - self._unpack(packed, wanted.size)
        self.nbytes += packed.nbytes
        rows = ranks.gather(packed)
        total = np.zeros_like(change)
        for row in rows:  # in the order of the ranks, so that all of them get the same bits
            total += self._unpack(row, wanted.size)
        return total


def _to_bf16(values: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even (IEEE 754), as its upper 16 bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _from_bf16(packed: Array, size: int) -> Array:
    return (packed.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_int8(values: Array) -> Array:
    """The scales of all blocks, and then the integers, as bytes."""
    blocks = np.pad(values, (0, -values.size % _BLOCK)).reshape(-1, _BLOCK)
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    numbers = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
    return np.concatenate([scales.astype(np.float32).view(np.uint8), numbers.reshape(-1)[: values.size].view(np.uint8)])


def _from_int8(packed: Array, size: int) -> Array:
    count = -(-size // _BLOCK)
    scales = packed[: 4 * count].view(np.float32)
    numbers = packed[4 * count :].view(np.int8).astype(np.float32)
    return numbers * np.repeat(scales, _BLOCK)[:size]
