"""Products that torch-mlir 20261001 has no lowering for."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.addmv.default)
def _addmv(
    x: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """With beta = 0, infinities and NaN in `x` do not count."""
    product = aten.mv.default(matrix, vector)
    scaled = product if alpha == 1 else alpha * product
    return scaled if beta == 0 else beta * x + scaled
