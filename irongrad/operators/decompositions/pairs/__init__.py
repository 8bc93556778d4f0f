"""Complex operators as functions of pairs of real tensors, one file for each kind of operator.

torch-mlir 20261001 and IREE 3.13.0 compile few complex operators, so `irongrad.operators.legalize.complex_numbers`
removes complex values from a graph. Formulas that need a source follow Higham, "Accuracy and Stability of Numerical
Algorithms" (2002), and Kahan, "Branch Cuts for Complex Elementary Functions" (1987).
"""

from __future__ import annotations

import functools
from importlib import import_module

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.pairs.pair import Pair, Rule, registered

__all__ = ["Pair", "pair_rules"]

_KINDS = ("pairs.arithmetic", "pairs.elementary", "pairs.inverse", "pairs.moves", "pairs.sums", "fft")


@functools.cache
def pair_rules() -> dict[Operator, Rule]:
    """Return the function of pairs for each operator that supports complex numbers."""
    for kind in _KINDS:
        import_module(f"irongrad.operators.decompositions.{kind}")
    return registered()
