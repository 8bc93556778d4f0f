"""Depthwise convolutions, of every channel by itself, as elementwise code over channels that lie side by side."""

from __future__ import annotations

from functools import reduce

import torch

from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.graph.convolutions.products import Tap, met, scattered, surrounded


def depthwise(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [C, 1, ...]: a sum of products over the places."""
    terms = [part * _place(weight, tap) for tap, part in met(x, window).items()]
    return reduce(torch.add, terms).permute(0, 3, 1, 2)


def depthwise_input_gradient(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [N, C, H, W] of the input."""
    last = surrounded(grad.permute(0, 2, 3, 1), window)
    return scattered(lambda tap: last * _place(weight, tap), window)


def depthwise_weight_gradient(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [C, 1, ...] of the weight: a sum over all positions for each place."""
    last, parts = grad.permute(0, 2, 3, 1), met(x, window)
    zero = grad.new_zeros(grad.shape[1])
    rows = [
        torch.stack([(last * parts[i, j]).sum([0, 1, 2]) if (i, j) in parts else zero for j in range(window.kernel[1])])
        for i in range(window.kernel[0])
    ]
    return torch.stack(rows).permute(2, 0, 1).unsqueeze(1)


def _place(weight: torch.Tensor, tap: Tap) -> torch.Tensor:
    return weight[:, 0, tap[0], tap[1]]
