"""Padding rules of pooling: windows read padding as they read positions beyond the edge of the tensor."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from irongrad.padding.layout import Dim, dim_of, size_of, solid
from irongrad.padding.padded import LOWEST, Padded
from irongrad.padding.registry import Call, NoRule, aten, rule
from irongrad.padding.rules.convolution import image

_SPATIAL = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
}


def _windows(call: Call) -> list[int]:
    """The dimensions that the windows slide over."""
    value = call["self"]
    dims = list(range(value.ndim - _SPATIAL[call.operator], value.ndim))
    if call["ceil_mode"] and value.padded(dims):
        raise NoRule("with ceil_mode=True has no padding rule where a window slides over padding")
    return dims


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(call: Call) -> list[Padded]:
    value, dims = call["self"], _windows(call)
    result, indices = call.run(self=call.padding.fill(value, LOWEST, dims))
    layout = image(call, value, len(dims))
    return [Padded(result, layout), Padded(_renumbered(call, indices, dims, to_bucket=False), layout)]


@rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _max_pool_backward(call: Call) -> Padded:
    value, dims = call["self"], _windows(call)
    call.like("grad_output", (*value.layout[: dims[0]], *call["grad_output"].layout[dims[0] :]))
    indices = _renumbered(call, call.padding.fill(call["indices"], 0), dims, to_bucket=True)
    return Padded(call.run(**call.zeros("grad_output"), indices=indices), tuple(map(solid, value.layout)))


def _renumbered(call: Call, indices: Tensor, dims: list[int], *, to_bucket: bool) -> Tensor:
    """Convert flat indices into the bucket's images to those into images without padding, or back with `to_bucket`."""
    value = call["self"]
    if not value.padded(dims[1:]):
        return indices
    true: list[Any] = [call.padding.sizes.true(size_of(value.layout[d])) for d in dims]
    bucket: list[Any] = [value.tensor.shape[d] for d in dims]
    source, target = (true, bucket) if to_bucket else (bucket, true)
    result: Any = 0
    stride: Any = 1
    for old, new in zip(reversed(source[1:]), reversed(target[1:]), strict=True):
        result = result + indices % old * stride
        indices = indices // old
        stride = stride * new
    renumbered: Tensor = result + indices * stride
    return renumbered


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(call: Call) -> Padded:
    value, dims = call["self"], _windows(call)
    layout = image(call, value, len(dims))
    filled = call.padding.fill(value, 0, dims)
    if not value.padded(dims) or _has_fixed_divisor(call):
        return Padded(call.run(self=filled), layout)
    return Padded(call.run(self=filled, divisor_override=1) / _counts(call, dims, layout[-len(dims) :]), layout)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(call: Call) -> Padded:
    value, dims = call["self"], _windows(call)
    layout = tuple(map(solid, value.layout))
    call.like("grad_output", (*value.layout[: dims[0]], *call["grad_output"].layout[dims[0] :]))
    gradient = call.padding.fill(call["grad_output"], 0)
    if not value.padded(dims) or _has_fixed_divisor(call):
        return Padded(call.run(grad_output=gradient), layout)
    counts = _counts(call, dims, call["grad_output"].layout[-len(dims) :])
    return Padded(call.run(grad_output=gradient / counts, divisor_override=1), layout)


def _has_fixed_divisor(call: Call) -> bool:
    """Whether every window has the same divisor."""
    return call["divisor_override"] is not None or call["count_include_pad"] or not any(call["padding"])


def _counts(call: Call, dims: list[int], windows: tuple[Dim, ...]) -> Tensor:
    """The number of elements of the tensor without padding in each window; 1 for a window of padding alone."""
    rank = len(dims)
    settings = (call["kernel_size"], call["stride"] or call["kernel_size"], call["padding"])
    kernel, stride, edge = (list(numbers) * (rank // len(numbers)) for numbers in settings)
    counts = torch.ones((), dtype=torch.int64)
    for i, d in enumerate(dims):
        size: Any = call.padding.sizes.true(size_of(call["self"].layout[d]))
        start = torch.arange(call.padding.extent(windows[i])) * stride[i] - edge[i]
        end = torch.minimum(start + kernel[i], torch.as_tensor(size))
        along = (end - start.clamp(min=0)).clamp(min=1)
        counts = counts * along.reshape([-1, *[1] * (rank - i - 1)])
    return counts


def _part_masks(call: Call, dim: Dim, count: int) -> Tensor:
    """For each of `count` parts of a dimension, a mask of the elements in it (PyTorch, AdaptivePooling.h)."""
    if len(dim) > 1:
        raise NoRule("divides a dimension whose padding lies between true elements")
    size: Any = call.padding.sizes.true(size_of(dim))
    part = torch.arange(count).unsqueeze(1)
    place = torch.arange(call.padding.extent(dim))
    return (place >= part * size // count) & (place < ((part + 1) * size + count - 1) // count)


def _adaptive_weights(call: Call, dim: Dim, count: int, dtype: torch.dtype) -> Tensor:
    """A matrix that maps a dimension to the means of its `count` parts."""
    inside = _part_masks(call, dim, count)
    return inside.to(dtype) / inside.sum(1, keepdim=True)


def _multiply_along(tensor: Tensor, d: int, matrix: Tensor) -> Tensor:
    """Multiply dimension `d` by `matrix`."""
    return (tensor.movedim(d, -1) @ matrix.t()).movedim(-1, d)


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _adaptive_pool(call: Call) -> Padded:
    value = call["self"]
    sizes = call["output_size"]
    dims = list(range(value.ndim - len(sizes), value.ndim))
    if any(isinstance(s, sympy.Basic) for s in sizes):
        raise NoRule("has an output size that depends on a named dimension")
    if not value.padded(dims):
        return Padded(call.run(), (*map(solid, value.layout[: -len(sizes)]), *map(dim_of, sizes)))
    result = call.padding.fill(value, 0, dims)
    for d, count in zip(dims, sizes, strict=True):
        result = _multiply_along(result, d, _adaptive_weights(call, value.layout[d], count, result.dtype))
    return Padded(result, (*map(solid, value.layout[: -len(sizes)]), *map(dim_of, sizes)))


@rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _adaptive_pool_backward(call: Call) -> Padded:
    value, gradient = call["self"], call["grad_output"]
    spatial = 2 if call.operator is aten._adaptive_avg_pool2d_backward.default else 3
    dims = list(range(value.ndim - spatial, value.ndim))
    layout = tuple(map(solid, value.layout))
    if gradient.padded(dims):
        raise NoRule("has an output size that depends on a named dimension")
    if not value.padded(dims):
        return Padded(call.run(), layout)
    result = gradient.tensor
    for d in dims:
        count = gradient.tensor.shape[d]
        result = _multiply_along(result, d, _adaptive_weights(call, value.layout[d], count, result.dtype).t())
    return Padded(result, layout)


@rule(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(call: Call) -> list[Padded]:
    """The largest element of each part, and its index; each part is a masked copy of the image."""
    value, sizes = call["self"], call["output_size"]
    dims = [value.ndim - 2, value.ndim - 1]
    if any(isinstance(s, sympy.Basic) for s in sizes):
        raise NoRule("has an output size that depends on a named dimension")
    layout = (*map(solid, value.layout[:-2]), *map(dim_of, sizes))
    if not value.padded(dims):
        return [Padded(r, layout) for r in call.run()]
    rows, columns = (_part_masks(call, value.layout[d], n) for d, n in zip(dims, sizes, strict=True))
    inside = rows[:, None, :, None] & columns[None, :, None, :]
    parts = torch.where(inside, value.tensor[..., None, None, :, :], float("-inf"))
    result, indices = parts.flatten(-2).max(-1)
    return [Padded(result, layout), Padded(_renumbered(call, indices, dims, to_bucket=False), layout)]


@rule(aten.adaptive_max_pool2d_backward.default)
def _adaptive_max_pool_backward(call: Call) -> Padded:
    value = call["self"]
    dims = [value.ndim - 2, value.ndim - 1]
    indices = _renumbered(call, call.padding.fill(call["indices"], 0), dims, to_bucket=True).flatten(-2)
    gradient = call.like("grad_output", (*value.layout[:-2], *call["grad_output"].layout[-2:])).tensor.flatten(-2)
    flat = torch.zeros_like(value.tensor).flatten(-2)
    return Padded(flat.scatter_add(-1, indices, gradient).reshape(value.tensor.shape), tuple(map(solid, value.layout)))
