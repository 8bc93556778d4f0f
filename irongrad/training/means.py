"""What training and evaluation steps report: the loss and the values beside it, by name, and their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

# The loss, as `loss`, and the values beside it by name.
Reported: TypeAlias = dict[str, float]
# The inputs of one call by name: numpy arrays, or objects with `__dlpack__` on the CPU.
Batch: TypeAlias = Mapping[str, Any]


def reported(result: Any) -> Reported:
    """Return what a training or evaluation step returned, by name."""
    loss, values = result if isinstance(result, tuple) else (result, {})
    return {"loss": loss, **values}


def mean_of(results: Sequence[Reported], weights: Sequence[int] | None = None) -> Reported:
    """Return the means of what several steps returned."""
    return {n: float(np.average([r[n] for r in results], weights=weights)) for n in results[0]}


def values_of(means: Reported) -> Reported:
    """Return the values beside the loss."""
    return {n: v for n, v in means.items() if n != "loss"}


def samples_in(batch: Batch) -> int:
    """Return the number of samples of a batch: the first dimension of its first input, or 1 for a single number."""
    shape: tuple[int, ...] = tuple(getattr(next(iter(batch.values()), None), "shape", ()))
    return int(shape[0]) if shape else 1
