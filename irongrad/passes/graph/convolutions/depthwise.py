"""Depthwise convolutions, which filter each channel separately, as elementwise code over adjacent channels."""

from __future__ import annotations

from functools import reduce

import torch

from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.graph.convolutions.products import Tap, met, scattered, surrounded


def depthwise(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution of `x` [N, C, H, W] with `weight` [C, 1, ...] as a sum of products over the taps."""
    terms = [part * _tap_weight(weight, tap) for tap, part in met(x, window).items()]
    return reduce(torch.add, terms).permute(0, 3, 1, 2)


def depthwise_input_gradient(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the gradient [N, C, H, W] of the input."""
    last = surrounded(grad.permute(0, 2, 3, 1), window)
    return scattered(lambda tap: last * _tap_weight(weight, tap), window)


def depthwise_weight_gradient(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the gradient [C, 1, ...] of the weight: for each tap, a sum over all positions."""
    last, parts = grad.permute(0, 2, 3, 1), met(x, window)
    zero = grad.new_zeros(grad.shape[1])
    rows = [
        torch.stack([(last * parts[i, j]).sum([0, 1, 2]) if (i, j) in parts else zero for j in range(window.kernel[1])])
        for i in range(window.kernel[0])
    ]
    return torch.stack(rows).permute(2, 0, 1).unsqueeze(1)


def _tap_weight(weight: torch.Tensor, tap: Tap) -> torch.Tensor:
    return weight[:, 0, tap[0], tap[1]]
