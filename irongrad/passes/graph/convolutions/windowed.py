"""Convolutions and their gradients as convolutions of an image that is there, channels-last and padded.

`passes/module/matmul_kernels` has kernels for them, which read the windows of the image in place.
"""

from __future__ import annotations

import math

import torch

from irongrad.memory_model.product_tiles import has_windows, slides, stretch_of
from irongrad.operators.decompositions.convolution import zero_padded
from irongrad.passes.graph.convolutions.depthwise import gradient_by_phase
from irongrad.passes.graph.convolutions.problem import Problem, Window
from irongrad.passes.graph.convolutions.products import gathered_product, gathered_products, widened

aten = torch.ops.aten


def is_windowed(problem: Problem) -> bool:
    """Whether there is a kernel of ours for a problem."""
    window, groups, taps = problem.window, problem.groups, math.prod(problem.window.kernel)
    inner, outer = (channels // groups for channels in problem.channels)
    out = problem.positions(window.out)
    sizes = {
        "forward": (out, outer, inner * taps),
        "input": (problem.positions(window.sizes), inner, outer * taps // math.prod(window.stride)),
        "weight": (inner * taps, outer, out),
    }
    rows, columns, summands = sizes[problem.kind]
    read = outer if problem.kind == "input" else inner
    stretch = (
        window.out[1] if problem.kind == "weight" else stretch_of(read, window.kernel[1], window.dilation[1], groups)
    )
    is_slid = slides(window.kernel, window.out) and not problem.is_depthwise
    return is_slid and has_windows({"b": groups, "r": rows, "c": columns, "k": summands}, stretch)


def windowed(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution of `x` [N, C, H, W] with `weight` [O, C / groups, ...] as one operation."""
    groups = x.shape[1] // weight.shape[1]
    if not slides(window.kernel, window.out):
        return gathered_product(x, weight, window) if groups == 1 else gathered_products(x, weight, window)
    geometry = [window.stride, [0, 0], window.dilation, False, [0, 0], groups]
    result: torch.Tensor = aten.convolution.default(*widened(_padded(x, window), weight), None, *geometry)
    return result


def windowed_input_gradient(grad: torch.Tensor, weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Compute the gradient of the input: for each phase of the stride, a convolution of the output's gradient."""
    turned = weight.unflatten(0, (problem.groups, -1)).transpose(1, 2).flatten(0, 1)  # [C, O / groups, ...]
    return gradient_by_phase(grad, turned, problem.window, windowed)


def windowed_weight_gradient(grad: torch.Tensor, x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Compute the gradient [O, C / groups, ...] of the weight as one convolution.

    The images are its channels, and the channels of a group are its images.
    """
    window, groups = problem.window, problem.groups
    images = _padded(x, window).unflatten(1, (groups, -1)).permute(2, 1, 0, 3, 4).flatten(1, 2)
    geometry = [window.dilation, [0, 0], window.stride, False, [0, 0], groups]
    result: torch.Tensor = aten.convolution.default(*widened(images, grad.transpose(0, 1)), None, *geometry)
    return result.transpose(0, 1)


def _padded(x: torch.Tensor, window: Window) -> torch.Tensor:
    """The padded image, channels-last in memory: the pass `layout` takes the result for channels-last, too."""
    return zero_padded(x.permute(0, 2, 3, 1), [0, 0, *window.pads()]).permute(0, 3, 1, 2)
