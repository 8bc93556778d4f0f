"""Activation functions and their backward, where PyTorch's decompositions or torch-mlir's lowerings are inadequate."""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch
from irongrad.operators.decompositions.series import computes_in

aten = torch.ops.aten

uses_pytorch(
    aten.elu,  # torch-mlir 20261001 subtracts 1 from exp(x), which loses the digits of a small x
    aten.threshold_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.glu_backward,
    aten.leaky_relu_backward,
    aten.elu_backward,
    aten.hardswish_backward,
    aten.hardsigmoid_backward,
    aten.hardtanh_backward,
    aten.log_sigmoid_backward,
    aten.mish_backward,
    aten.softplus_backward,
)


@decomposes(aten.gelu.default)
def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units" (2016).

    torch-mlir 20261001 evaluates the approximation with other constants, which gives errors of 5e-4. IREE has no erf
    for float64.
    """
    if approximate == "tanh":
        return _gelu_by_tanh(x)
    return _gelu_by_erf(x)


@computes_in(torch.float32, torch.float64)
def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    """The paper's approximation, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))).tanh())


@computes_in(torch.float32, torch.float64)
def _gelu_by_erf(x: torch.Tensor) -> torch.Tensor:
    """`x` times the normal distribution function, 0.5 (1 + erf(x / sqrt(2)))."""
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())


@decomposes(aten.hardshrink_backward.default)
def _hardshrink_backward(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    return _zero_inside(grad, x, threshold)


@decomposes(aten.softshrink_backward.default)
def _softshrink_backward(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    return _zero_inside(grad, x, threshold)


def _zero_inside(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """The gradient of either shrink function: 0 for |x| <= threshold, else `grad` (ATen, Activation.cpp)."""
    return torch.where((x >= -threshold) & (x <= threshold), 0.0, grad)
