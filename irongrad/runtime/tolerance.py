"""How far a compiled result may be from the exact one, for steps from any framework; needs neither torch nor JAX.

A compiled value is right if its error is within a small factor of the largest error of the reference runs. These are
right by definition: the user's own step in its own dtypes, once unchanged and several times with other rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FACTOR = 4.0  # how much larger than a reference run's error a compiled result's may be
FLOOR_ULPS = 16.0  # always allowed, in last-place units (ulps) of the largest element
# The same for a step that computes in float64, as the oracle does. The oracle's own rounding error is then unknown:
# eager adds up the squares of a norm in one chain, and is 1,500 ulps off at 10 million elements.
FLOOR_ULPS_FLOAT64 = 8192.0
# How much wider tolerances are if the exact values are those of a run in the step's own dtypes. The rounding error of
# that run is then unknown, and no other run shows it: in a critic's third Adam update, it was twice what noise made it.
SAME_DTYPE = 4.0
NOISY_RUNS = 6
# Reference runs are added until no error is above this fraction of its tolerance
# (`irongrad.pipeline.oracle.expected_values`). The tolerance that is kept then leaves room for a CPU that rounds
# differently.
SETTLED = 0.75
NOISE_ULPS = 4.0  # a sum in another order rounds more often than eager's single operator
NOISE_ULPS_OF_HALVES = 1.0  # half precision is computed in float32 and rounded once

_EPS_FLOAT64 = float(np.finfo(np.float64).eps)
# Below the smallest normal float32, rounding errors are absolute, and an operator may flush an intermediate value to
# zero.
_TINY = float(np.finfo(np.float32).tiny)


def allowed_error(exact: np.ndarray[Any, Any], largest: float, eps: float, *, rounded: bool = False) -> float:
    """Return the largest acceptable absolute error of a compiled value.

    Args:
        exact: the exact value.
        largest: the largest error of any run in the step's own dtypes.
        eps: the machine epsilon of the dtype that computes the value; 0 for integers and booleans.
        rounded: whether `exact` itself is of a run in the step's own dtypes.
    """
    scale = float(np.max(np.abs(exact), initial=0.0))
    if not np.isfinite(scale):
        scale = float(np.max(np.abs(exact[np.isfinite(exact)]), initial=0.0))
    ulps = FLOOR_ULPS_FLOAT64 if eps == _EPS_FLOAT64 else FLOOR_ULPS
    underflow = _TINY if eps else 0.0
    return (SAME_DTYPE if rounded else 1.0) * (FACTOR * largest + ulps * eps * scale + underflow)
