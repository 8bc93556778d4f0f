"""Philox 4x32-10, the counter-based random number generator, as operators on int64 tensors.

J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Ten
rounds of two 32-bit multiplications turn a 128-bit counter and a 64-bit key into 128 random bits. The bits are the same
on every target. There is no state, so they can be computed in any order.

A word is an int64 in [0, 2^32). The product of two words wraps around as an int64, but its bits are those of the
unsigned product. The mask after the arithmetic shift drops the copies of the sign bit.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Words: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

BITS = 32
MASK = (1 << BITS) - 1

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
