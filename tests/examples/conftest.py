"""Compares the losses of a compiled example with those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.runtime.tolerance import FACTOR, FLOOR_ULPS, NOISY_RUNS

# Runs an example eagerly in a dtype and returns its losses.
EagerRun = Callable[[torch.dtype], Sequence[float]]
CheckLosses = Callable[[Sequence[float], EagerRun], None]


@pytest.fixture
def check_losses() -> CheckLosses:
    """`check_losses(found, eager)` checks every loss against the number contract.

    The allowed error is a small factor of the error of eager float32 against eager float64. That error is the largest
    of a plain run and of runs with perturbed rounding.
    """

    def check(found: Sequence[float], eager: EagerRun) -> None:
        exact = np.array(eager(torch.float64))
        spread = np.zeros_like(exact)
        for seed in (None, *range(NOISY_RUNS)):
            with RoundingNoise(seed) if seed is not None else nullcontext():
                spread = np.maximum(spread, np.abs(np.array(eager(torch.float32)) - exact))
        assert spread.max() < 1e-3, "eager runs differ so much from each other that anything would be right"
        error, allowed = np.abs(np.array(found) - exact), FACTOR * spread + FLOOR_ULPS * 2.0**-23 * np.abs(exact)
        assert (error <= allowed).all(), (error, allowed)

    return check
