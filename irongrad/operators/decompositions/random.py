"""The backward of what random operators draw; the draws themselves are `irongrad.operators.random`."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch

aten = torch.ops.aten

uses_pytorch(aten.native_dropout_backward)

_FIXED_SLOPE = 1e-6  # where the bounds are nearer than this, ATen's Activation.cpp takes the slope to be fixed


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
    """The drawn slopes times the gradient, in training; torch-mlir 20261001's is wrong in evaluation."""
    if training and upper - lower > _FIXED_SLOPE:
        return grad * noise
    return torch.where(x > 0, grad, grad * ((lower + upper) / 2))
