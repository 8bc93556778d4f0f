"""Depthwise convolutions, which filter each channel separately."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import gcd

import torch
from torch.nn import functional as F

from irongrad.operators.decompositions.convolution import zero_padded
from irongrad.passes.graph.convolutions.problem import Problem, Window
from irongrad.passes.graph.convolutions.products import Tap, met
from irongrad.passes.stack_by_position import stack_by_position

aten = torch.ops.aten


def filtered(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution of `x` [N, C, H, W] with `weight` [O, 1, ...] as one operation.

    `passes/module/depthwise_kernels` has kernels for it, and for the one of `filtered_weight_gradient`. If O is a
    multiple of C, each channel is repeated.
    """
    x = _repeated(x, weight.shape[0])
    geometry = [window.stride, [0, 0], window.dilation, False, [0, 0], x.shape[1]]
    result: torch.Tensor = aten.convolution.default(_padded(x, window), weight, None, *geometry)
    return result


def filtered_input_gradient(grad: torch.Tensor, weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Compute the gradient [N, C, H, W] of the input: a convolution of the output's gradient with the flipped weight.

    With a stride, zeros are inserted between outputs. They are multiplied, which takes less time than to interleave the
    convolutions of each phase.
    """
    window, channels = problem.window, problem.channels[0]
    high, wide = window.stride
    if max(window.stride) > 1:
        spread = grad.permute(0, 2, 3, 1).unsqueeze(3).unsqueeze(2)  # [N, H, 1, W, 1, C]
        spread = F.pad(spread, [0, 0, 0, wide - 1, 0, 0, 0, high - 1])
        grad = spread.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
    reaches = [(kernel - 1) * apart for kernel, apart in zip(window.kernel, window.dilation, strict=True)]
    padding = tuple(reach - pad for reach, pad in zip(reaches, window.padding, strict=True))
    sizes = grad.shape[2], grad.shape[3]
    turned = Window(sizes, window.sizes, window.kernel, (1, 1), padding, window.dilation)
    result = filtered(grad, weight.flip([2, 3]), turned)
    return result.unflatten(1, (channels, -1)).sum(2) if channels < result.shape[1] else result


def filtered_weight_gradient(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the gradient [O, 1, ...] of the weight as one convolution, in which the images are channels."""
    x = _repeated(x, grad.shape[1])
    images = _padded(x, window).transpose(0, 1).flatten(0, 1).unsqueeze(0)
    geometry = [window.dilation, [0, 0], window.stride, False, [0, 0], x.shape[1]]
    result: torch.Tensor = aten.convolution.default(images, grad.transpose(0, 1), None, *geometry)
    return result.transpose(0, 1)


def depthwise(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution as a sum of products over the taps, which is elementwise code over adjacent channels."""
    terms = [part * _tap_weight(weight, tap) for tap, part in met(x, window).items()]
    return reduce(torch.add, terms).permute(0, 3, 1, 2)


def depthwise_input_gradient(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the gradient of the input by `depthwise` of the output's gradient with the flipped weight."""
    return gradient_by_phase(grad, weight, window, depthwise)


def gradient_by_phase(
    grad: torch.Tensor,
    weight: torch.Tensor,
    window: Window,
    convolution: Callable[[torch.Tensor, torch.Tensor, Window], torch.Tensor],
) -> torch.Tensor:
    """Compute the gradient of the input by convolutions of the output's gradient with the flipped weight.

    Inputs that are a multiple of the stride apart are read by the same taps, so each such phase is a convolution of its
    own. Then the phases are interleaved. So no zeros are inserted between outputs and multiplied.

    Args:
        grad: the gradient of the output, [N, O, *out].
        weight: the weight, with the channels of the result first.
        window: the geometry of the forward convolution.
        convolution: computes a convolution.
    """

    def phase(first: tuple[int, int]) -> torch.Tensor:
        """The gradient of the input `first`, and of all that are a multiple of the stride away."""
        parts = [_taps_of_phase(window, d, first[d]) for d in range(2)]
        counts = tuple(-(-window.sizes[d] // window.stride[d]) for d in range(2))
        nothing = grad.new_zeros([grad.shape[0], weight.shape[0], *counts])
        if None in parts:
            return nothing
        (rows, above, down), (columns, before, across) = (part for part in parts if part is not None)
        own = weight[:, :, rows][:, :, :, columns].flip([2, 3])
        kernel = own.shape[2], own.shape[3]
        of_phase = Window(window.out, counts, kernel, (1, 1), (above, before), (down, across))
        return convolution(grad, own, of_phase) if of_phase.taps() else nothing

    high, wide = (range(step) for step in window.stride)
    if len(high) == len(wide) == 1:
        return phase((0, 0))
    both = stack_by_position([stack_by_position([phase((i, j)) for j in wide], 4) for i in high], 3)
    image = both.flatten(4, 5).flatten(2, 3)
    return image[:, :, : window.sizes[0], : window.sizes[1]]


def depthwise_weight_gradient(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the gradient of the weight: for each tap, a sum over all positions."""
    last, parts = grad.permute(0, 2, 3, 1), met(x, window)
    zero = grad.new_zeros(grad.shape[1])
    rows = [
        torch.stack([(last * parts[i, j]).sum([0, 1, 2]) if (i, j) in parts else zero for j in range(window.kernel[1])])
        for i in range(window.kernel[0])
    ]
    return torch.stack(rows).permute(2, 0, 1).unsqueeze(1)


def _taps_of_phase(window: Window, dim: int, first: int) -> tuple[slice, int, int] | None:
    """The taps that read the input `first`, and the padding and dilation of the convolution that is their gradient.

    None if no tap reads it. Tap `t` reads input `x` for output `(x + padding - t * dilation) / stride`.
    """
    step, pad, dilation = window.stride[dim], window.padding[dim], window.dilation[dim]
    taps = [t for t in range(window.kernel[dim]) if (first + pad - t * dilation) % step == 0]
    if not taps:
        return None
    apart = step // gcd(step, dilation)
    moved = apart * dilation // step
    output = (first + pad - taps[0] * dilation) // step
    return slice(taps[0], None, apart), (len(taps) - 1) * moved - output, moved


def _repeated(x: torch.Tensor, channels: int) -> torch.Tensor:
    """The image with each channel repeated, so that it has so many."""
    return x if x.shape[1] == channels else x.unsqueeze(2).expand(-1, -1, channels // x.shape[1], -1, -1).flatten(1, 2)


def _padded(x: torch.Tensor, window: Window) -> torch.Tensor:
    return zero_padded(x, window.pads())


def _tap_weight(weight: torch.Tensor, tap: Tap) -> torch.Tensor:
    return weight[:, 0, tap[0], tap[1]]
