"""Elements of a parameter whose update rounding decides.

The first update of Adam is the learning rate times the sign of the gradient. Where the gradient is zero within its own
tolerance, either sign is right. Other elements of the tensor are judged as always.
"""

from __future__ import annotations

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.golden import Golden, key_of

# Keys of optimizer state that is linear in the gradients.
MOMENTS = ("exp_avg", "momentum_buffer")

# Two right programs may move an element in opposite directions.
_BOTH_WAYS = 2.0


def unforgiven(golden: Golden, key: str, difference: Array) -> Array:
    """Take from differences of a parameter what undecided updates may have made of them.

    Args:
        golden: the expected values.
        key: the key of the value, one of `Golden.moves`.
        difference: absolute differences from the expected value, of its shape.

    Returns:
        The differences that are left, of the same shape. Elsewhere than at undecided elements, nothing is taken.
    """
    most = _BOTH_WAYS * golden.moves[key]
    return np.where(_undecided(golden, key), np.maximum(difference - most, 0.0), difference)


def _undecided(golden: Golden, key: str) -> Array:
    """Which elements of a parameter had a gradient or a moment that is zero within its tolerance, in any step so far.

    An exact zero counts as decided: a row that no index selects must not move.
    """
    _, steps, name = key.split("/", 2)
    found = np.zeros(golden.expected[key].shape, bool)
    for step in range(int(steps)):
        moments = [key_of("state", step + 1, f"optimizer/{moment}/{name}") for moment in MOMENTS]
        for source in (key_of("gradient", step, name), *moments):
            if source in golden.expected and golden.expected[source].shape == found.shape:
                size = np.abs(golden.expected[source])
                found |= (size > 0.0) & (size <= golden.allowed[source])
    return found
