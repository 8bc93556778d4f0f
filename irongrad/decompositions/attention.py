"""Scaled dot-product attention, softmax and their backward."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import uses_pytorch

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten._safe_softmax,
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
)
