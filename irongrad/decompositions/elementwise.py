"""Functions of one element at a time, and the backward of activations."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import uses_pytorch

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten.threshold_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.rsub,
    aten.sgn,
    aten.detach,
)
