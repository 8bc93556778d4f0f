"""Loss functions and their backward."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import uses_pytorch

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
)
