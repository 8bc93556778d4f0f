"""What every operator is expanded to before import, one file a family of operators.

torch-mlir takes a closed set of operators, and IREE compiles some of those to slow or wrong code. Everything else is
written here as functions of tensors, traced into the graph (PyTorch, "make_fx", `decomposition_table`).
"""

from __future__ import annotations

import functools
from importlib import import_module

from irongrad.decompositions.registry import Decomposition, Operator, decomposes, keeps, merged, uses_pytorch

__all__ = ["decomposes", "decomposition_table", "keeps", "uses_pytorch"]

FAMILIES = (
    "attention",
    "bins",
    "convolution",
    "elementwise",
    "embedding_bag",
    "extremes",
    "fft",
    "indexing",
    "linalg_eigen",
    "linalg_factor",
    "linalg_solve",
    "loss",
    "normalisation",
    "padding",
    "pooling",
    "reductions",
    "resampling",
    "scans",
    "scatter",
    "segments",
    "shapes",
    "sorting",
    "special",
)


@functools.cache
def decomposition_table() -> dict[Operator, Decomposition]:
    """torch-mlir's table, with PyTorch's decompositions that are missing from it, with ours."""
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    for family in FAMILIES:
        import_module(f"irongrad.decompositions.{family}")
    return merged(get_decomposition_table())
