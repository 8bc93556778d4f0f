"""Philox 4x32-10, the counter-based random number generator, as operators on int64 tensors.

J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Ten
rounds of two 32-bit multiplications turn a 128-bit counter and a 64-bit key into 128 random bits. The bits are the same
on every target. There is no state, so they can be computed in any order.

A word is an int64 in [0, 2^32). The product of two words wraps around as an int64, but its bits are those of the
unsigned product. The mask after the arithmetic shift drops the copies of the sign bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

Words: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

BITS = 32
MASK = (1 << BITS) - 1

# The elements that `philox_eagerly` computes at once: their words stay in the second-level cache.
_AT_ONCE = 1 << 14

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the key's increment per round: the golden ratio and sqrt(3) - 1


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four random words of `counter` under `key`; elementwise, with broadcast shapes."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = high_word(right) ^ c1 ^ k0, right & MASK, high_word(left) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def high_word(value: torch.Tensor) -> torch.Tensor:
    """Return the upper 32 bits of a 64-bit value."""
    return (value >> BITS) & MASK


def philox_eagerly(places: torch.Tensor, counter: Sequence[int], key: Sequence[int]) -> Words:
    """Return the words of `philox` in a tenth of its time, for numbers that are known.

    Each operator of PyTorch reads and writes all elements, and there are a hundred of them.

    Args:
        places: the first word of the counter of each element, int64.
        counter: the other three words.
        key: both words of the key.
    """
    flat = places.numpy().reshape(-1)
    made = np.empty((4, flat.size), np.uint64)
    for start in range(0, flat.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        made[:, part] = _of_part(flat[part].astype(np.uint64), counter, key)
    c0, c1, c2, c3 = (torch.from_numpy(row.view(np.int64)).reshape(places.shape) for row in made)
    return c0, c1, c2, c3


def _of_part(first: np.ndarray, counter: Sequence[int], key: Sequence[int]) -> list[np.ndarray]:
    """The four words of a few elements; all arithmetic is in place."""
    bits, mask = np.uint64(BITS), np.uint64(MASK)
    words = [first, *(np.full(first.shape, word, np.uint64) for word in counter)]
    spare = [np.empty_like(first) for _ in words]
    for number in range(_ROUNDS):
        left, right, c0, c2 = spare
        np.multiply(words[0], np.uint64(_MULTIPLIERS[0]), out=left)
        np.multiply(words[2], np.uint64(_MULTIPLIERS[1]), out=right)
        for new, product, old, k, step in (
            (c0, right, words[1], key[0], _WEYL[0]),
            (c2, left, words[3], key[1], _WEYL[1]),
        ):
            np.right_shift(product, bits, out=new)
            new ^= old
            new ^= np.uint64((k + number * step) & MASK)
            product &= mask
        spare, words = words, [c0, right, c2, left]
    return words
