"""Convolutions and pooling, with ONNX's ways to specify padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.registry import Call, Value, operator, tensor
from irongrad.operators.decompositions.windows import Window

Pads = list[tuple[int, int]]


def _pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Pads:
    """Return the padding before and after each spatial dimension."""
    rank = len(kernel)
    auto = call.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        given = call.get("pads") or [0] * 2 * rank
        return [(0, 0) if auto == "VALID" else (given[i], given[i + rank]) for i in range(rank)]
    pads = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size, 0)
        pads.append((total - total // 2, total // 2) if auto == "SAME_LOWER" else (total // 2, total - total // 2))
    return pads


def _padded(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    flat = [p for pair in reversed(pads) for p in pair]
    return functional.pad(x, flat, value=value) if any(flat) else x


def _is_symmetric(pads: Pads) -> bool:
    return all(before == after for before, after in pads)


def _window(call: Call, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int], Pads]:
    strides = list(call.get("strides") or [1] * len(kernel))
    dilations = list(call.get("dilations") or [1] * len(kernel))
    return strides, dilations, _pads(call, x.shape[2:], kernel, strides, dilations)


@operator("Conv")
def conv(call: Call, x: Value, w: Value, b: Value | None = None) -> Tensor:
    """Convolve in one to three spatial dimensions."""
    value, weight = tensor(x), tensor(w)
    strides, dilations, pads = _window(call, value, weight.shape[2:])
    if not _is_symmetric(pads):
        value, pads = _padded(value, pads), [(0, 0)] * len(pads)
    bias = tensor(b) if b is not None else None
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3]
    return function(value, weight, bias, strides, [p for p, _ in pads], dilations, call.get("group", 1))


@operator("ConvTranspose")
def conv_transpose(call: Call, x: Value, w: Value, b: Value | None = None) -> Tensor:
    """Compute the gradient of a convolution; elements outside of the wanted size are cut off."""
    value, weight = tensor(x), tensor(w)
    rank = weight.ndim - 2
    strides = list(call.get("strides") or [1] * rank)
    dilations = list(call.get("dilations") or [1] * rank)
    extra = list(call.get("output_padding") or [0] * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    whole = [(n - 1) * s + r + e for n, s, r, e in zip(value.shape[2:], strides, reach, extra, strict=True)]
    pads = _cut(call, value, strides, whole)
    bias = tensor(b) if b is not None else None
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    groups = call.get("group", 1)
    if _is_symmetric(pads) and all(p >= 0 for p, _ in pads):
        both = [p for p, _ in pads]
        return function(value, weight, bias, strides, both, extra, groups, dilations)
    whole_result = function(value, weight, bias, strides, 0, extra, groups, dilations)
    return functional.pad(whole_result, [-p for pair in reversed(pads) for p in pair])


def _cut(call: Call, x: Tensor, strides: Sequence[int], whole: Sequence[int]) -> Pads:
    """Return how many elements of the whole result are cut off before and after, by dimension."""
    auto, shape, rank = call.get("auto_pad", "NOTSET"), call.get("output_shape"), len(whole)
    if shape is None and auto in ("NOTSET", "VALID"):
        given = call.get("pads") or [0] * 2 * rank
        return [(given[i], given[i + rank]) if auto == "NOTSET" else (0, 0) for i in range(rank)]
    wanted = list(shape[-rank:]) if shape is not None else [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    totals = [w - n for w, n in zip(whole, wanted, strict=True)]
    return [(t // 2, t - t // 2) if auto == "SAME_UPPER" else (t - t // 2, t // 2) for t in totals]


@operator("Col2Im")
def col2im(call: Call, x: Value, sizes: Value, kernel: Value) -> Tensor:
    """Add the columns of windows up to an image; the inverse of taking windows, where they do not overlap."""
    window = call.ints(kernel, "a window")
    strides, dilations = (list(call.get(n) or [1] * len(window)) for n in ("strides", "dilations"))
    pads = _pads(call, (), window, strides, dilations)
    if len(window) != 2 or not _is_symmetric(pads):
        raise call.node.unsupported("has other than two spatial dimensions or asymmetric pads, which is not supported")
    before = [p for p, _ in pads]
    return functional.fold(tensor(x), call.ints(sizes, "a size"), window, dilations, before, strides)


@operator("MaxPool")
def max_pool(call: Call, x: Value) -> Any:
    """Return the maximum of each window and, as a second output, its index in the flattened tensor."""
    value = tensor(x)
    kernel = call.get("kernel_shape")
    strides, dilations, pads = _window(call, value, kernel)
    ceil = bool(call.get("ceil_mode", 0))
    if call.wants(1) and (call.get("storage_order", 0) or not _is_symmetric(pads)):
        raise call.node.unsupported(
            "returns indices in column-major order or with asymmetric padding, which is not supported"
        )
    if not _is_symmetric(pads) or any(2 * p > k for (p, _), k in zip(pads, kernel, strict=True)):
        least = float("-inf") if value.is_floating_point() else torch.iinfo(value.dtype).min
        value, pads = _padded(value, pads, least), [(0, 0)] * len(pads)
    arguments = (kernel, strides, [p for p, _ in pads], dilations, ceil)
    rank = len(kernel)
    if not call.wants(1):
        return (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1](value, *arguments)
    function = (
        functional.max_pool1d_with_indices,
        functional.max_pool2d_with_indices,
        functional.max_pool3d_with_indices,
    )[rank - 1]
    found, places = function(value, *arguments)
    planes = math.prod(value.shape[2:]) * torch.arange(math.prod(value.shape[:2])).reshape(
        value.shape[:2] + (1,) * rank
    )
    return [found, places + planes]


@operator("AveragePool")
def average_pool(call: Call, x: Value) -> Tensor:
    """Return the mean of each window, over the elements inside the borders or over the padding too."""
    value = tensor(x)
    kernel = call.get("kernel_shape")
    strides, dilations, pads = _window(call, value, kernel)
    counted = bool(call.get("count_include_pad", 0))
    ceil = bool(call.get("ceil_mode", 0))
    simple = (
        _is_symmetric(pads)
        and set(dilations) == {1}
        and all(2 * p <= k for (p, _), k in zip(pads, kernel, strict=True))
    )
    if simple:
        function = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(kernel) - 1]
        return function(value, kernel, strides, [p for p, _ in pads], ceil, counted)
    return _window_sums(value, kernel, strides, dilations, pads, ceil) / _window_sums(
        _padded(torch.ones_like(value[:1, :1]), pads, 1.0) if counted else torch.ones_like(value[:1, :1]),
        kernel,
        strides,
        dilations,
        [(0, 0)] * len(pads) if counted else pads,
        ceil,
    )


def _window_sums(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Pads, ceil: bool
) -> Tensor:
    """Return the sum of each window, by a convolution with ones.

    With `ceil`, windows may reach beyond the padding.
    """
    if ceil:
        numbers = zip(x.shape[2:], kernel, strides, pads, dilations, strict=True)
        windows = [Window(size, k, step, *pad, gap, ceil_mode=True) for size, k, step, pad, gap in numbers]
        pads = [(w.before, max(w.after, w.end - w.size)) for w in windows]
    padded = _padded(x, pads)
    planes = padded.reshape(-1, 1, *padded.shape[2:])
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[len(kernel) - 1]
    sums = function(planes, ones, None, list(strides), 0, list(dilations))
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


@operator("LpPool")
def lp_pool(call: Call, x: Value) -> Tensor:
    """Return the p-norm of each window."""
    value, p = tensor(x), call.get("p", 2)
    kernel = call.get("kernel_shape")
    strides, dilations, pads = _window(call, value, kernel)
    sums = _window_sums(value.abs() ** p, kernel, strides, dilations, pads, bool(call.get("ceil_mode", 0)))
    return sums ** (1 / p)


@operator("GlobalAveragePool")
def global_average_pool(call: Call, x: Value) -> Tensor:
    """Return the mean over all spatial dimensions."""
    value = tensor(x)
    return value.mean(tuple(range(2, value.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(call: Call, x: Value) -> Tensor:
    """Return the maximum over all spatial dimensions."""
    value = tensor(x)
    return value.amax(tuple(range(2, value.ndim)), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(call: Call, x: Value) -> Tensor:
    """Return the p-norm over all spatial dimensions."""
    value = tensor(x)
    return torch.linalg.vector_norm(value, call.get("p", 2), tuple(range(2, value.ndim)), keepdim=True)
