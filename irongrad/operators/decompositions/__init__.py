"""Decompositions of operators into simpler ones before import, one file per family of operators.

torch-mlir accepts a closed set of operators, and IREE compiles some of those to slow or wrong code. This package writes
every other operator as a function of tensors. Tracing records these functions into the graph (PyTorch, "make_fx",
`decomposition_table`).
"""

from __future__ import annotations

import functools
from importlib import import_module

from irongrad.graph.recorder import Decomposition, Operator
from irongrad.operators.decompositions.registry import (
    decomposes,
    family_of,
    keeps,
    merged,
    register_decomposition,
    uses_pytorch,
    with_users,
)

__all__ = ["decomposes", "decomposition_table", "is_ours", "keeps", "register_decomposition", "uses_pytorch"]

FAMILIES = (
    "activations",
    "attention",
    "batch_norm",
    "bins",
    "bounds",
    "comparisons",
    "constants",
    "convolution",
    "divisions",
    "elementwise",
    "embedding_bag",
    "extremes",
    "fft",
    "grid_sampling",
    "grouped_products",
    "halves",
    "hyperbolic",
    "indexing",
    "integers",
    "linalg_distances",
    "linalg_eigen",
    "linalg_factor",
    "linalg_functions",
    "linalg_products",
    "linalg_qr",
    "linalg_solve",
    "loss",
    "loss_ctc",
    "loss_margin",
    "normalisation",
    "padding",
    "pooling",
    "pooling_max",
    "powers",
    "random",
    "recurrent",
    "reductions",
    "resampling",
    "scans",
    "scatter",
    "segments",
    "shapes",
    "sorting",
    "special_bessel",
    "special_erf",
    "special_gamma",
    "sync_batch_norm",
    "trigonometric",
    "unfolding",
)


def decomposition_table() -> dict[Operator, Decomposition]:
    """Merge the tables of torch-mlir, PyTorch, IronGrad and the user; a later table overrides an earlier one.

    Of PyTorch's decompositions, only the ones that torch-mlir's table lacks are added.
    """
    return with_users(_table())


def is_ours(operator: Operator) -> bool:
    """Whether the decomposition of `operator` is IronGrad's own or a user's."""
    _table()
    return family_of(operator) is not None


@functools.cache
def _table() -> dict[Operator, Decomposition]:
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    for family in FAMILIES:
        import_module(f"irongrad.operators.decompositions.{family}")
    return merged(get_decomposition_table())
