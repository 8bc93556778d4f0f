"""How far from exact values a compiled result may be, whoever made the exact ones; needs neither torch nor JAX.

A compiled value is right when its error is within a small factor of the largest error of runs that are right by
definition: the user's own step in its own dtypes, once as it is and several times with other rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FACTOR = 4.0  # how much worse than a run in the same dtypes a compiled result may be
FLOOR_ULPS = 16.0  # what is allowed in any case, in last-place units of the largest element
# The same where the step computes in float64 as the oracle does, whose own rounding is then unknown: eager adds up the
# squares of a norm in one chain, and is 1,500 units off at 10 million elements.
FLOOR_ULPS_FLOAT64 = 8192.0
NOISY_RUNS = 6
# Runs are made until no error is above this part of what they allow (`irongrad.pipeline.oracle.expected_values`): what
# is kept then leaves room for a CPU that rounds otherwise.
SETTLED = 0.75
NOISE_ULPS = 4.0  # a sum in another order rounds more often than the one operator that eager has for it
NOISE_ULPS_OF_HALVES = 1.0  # computed in float32 and rounded once

_EPS_FLOAT64 = float(np.finfo(np.float64).eps)
# Rounding is absolute below the smallest normal float32, and one operator's intermediate value may be flushed to zero.
_TINY = float(np.finfo(np.float32).tiny)


def allowed_error(exact: np.ndarray[Any, Any], largest: float, eps: float) -> float:
    """The largest absolute error of a compiled value that is right.

    Args:
        exact: the exact value.
        largest: the largest error of any run in the step's own dtypes.
        eps: the machine epsilon of the dtype in which it is computed; 0 for integers and booleans.
    """
    scale = float(np.max(np.abs(exact), initial=0.0))
    if not np.isfinite(scale):
        scale = float(np.max(np.abs(exact[np.isfinite(exact)]), initial=0.0))
    ulps = FLOOR_ULPS_FLOAT64 if eps == _EPS_FLOAT64 else FLOOR_ULPS
    underflow = _TINY if eps else 0.0
    return FACTOR * largest + ulps * eps * scale + underflow
