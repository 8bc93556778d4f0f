"""Views, slices and other changes of shape, and their backward."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import decomposes, uses_pytorch

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten.select_backward,
    aten.slice_backward,
    aten.tril,
    aten.triu,
)


@decomposes(aten.detach_copy.default)
def detach_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: a graph that computes no gradients has nothing to detach from."""
    return aten.alias(tensor)
