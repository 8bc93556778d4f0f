"""Products that torch-mlir 20261001 has no lowering for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.addmv.default)
def _addmv(
    x: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """With beta = 0, `x` is ignored, including its infinities and NaN."""
    product = aten.mv.default(matrix, vector)
    scaled = product if alpha == 1 else alpha * product
    return scaled if beta == 0 else beta * x + scaled


@decomposes(aten._trilinear.default)
def _trilinear(
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    sum_dims: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """The sum over `sum_dims` of the product of three tensors, each expanded by dimensions of size 1.

    `nn.Bilinear` and its gradients need this form for an empty batch, which torch-mlir 20261001 takes for a batch of
    size 1. Otherwise torch-mlir's own form stays, because IREE 3.13.0 crashes on some of the sums written here.
    """
    if x.numel() and y.numel() and z.numel():
        return NotImplemented
    for dim in expand_x:
        x = x.unsqueeze(dim)
    for dim in expand_y:
        y = y.unsqueeze(dim)
    for dim in expand_z:
        z = z.unsqueeze(dim)
    product = x * y * z
    return aten.sum.dim_IntList(product, list(sum_dims)) if sum_dims else product
