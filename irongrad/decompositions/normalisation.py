"""Batch, layer, group and other normalisation, and their backward."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import uses_pytorch

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten.native_batch_norm_backward,
    aten.native_layer_norm_backward,
    aten.native_group_norm_backward,
)
