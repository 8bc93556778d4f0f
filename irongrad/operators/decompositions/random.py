"""The backward of random operators; `irongrad.operators.random` has the draws themselves."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch

aten = torch.ops.aten

uses_pytorch(aten.native_dropout_backward)

_FIXED_SLOPE = 1e-6  # ATen's Activation.cpp takes the slope as fixed unless the bounds differ by more than this


@decomposes(aten.rrelu_with_noise_backward.default)
def _rrelu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> torch.Tensor:
    """In training, the drawn slopes times the gradient; torch-mlir 20261001's decomposition is wrong in evaluation."""
    if training and upper - lower > _FIXED_SLOPE:
        return grad * noise
    return torch.where(x > 0, grad, grad * ((lower + upper) / 2))
