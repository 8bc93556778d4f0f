"""Padding rules of normalisations: means and variances are over true elements.

The rules compute the gradient of y = x' = (x - mean) / deviation over n elements as
dx = (dy - mean(dy) - x' mean(dy x')) / deviation (S. Ioffe and C. Szegedy, "Batch Normalization", 2015, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from irongrad.operators.decompositions.sync_batch_norm import gradients, normalised, pooled
from irongrad.padding.layout import Layout, dim_of, size_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule
from irongrad.padding.rules.reductions import moments, wide


def _solid(value: Padded) -> Layout:
    return tuple(map(solid, value.layout))


def _gradient(
    call: Call, dy: Padded, x: Padded, mean: Tensor, inverse: Tensor, dims: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The gradient of the input that was normalised along `dims`, and x' with zeros for padding."""
    count = call.padding.count(x, dims)
    filled = call.padding.fill(dy, 0, dims)
    scaled = call.padding.fill(Padded((wide(x.tensor) - mean) * inverse, x.layout), 0)
    parts = filled.sum(dims, keepdim=True) / count
    along = (filled * scaled).sum(dims, keepdim=True) / count
    return (filled - parts - scaled * along) * inverse, scaled


def _channels(vector: Tensor | None, rank: int) -> Tensor | None:
    """Reshape a vector of channels so that it broadcasts to (batch, channel, …)."""
    return None if vector is None else vector.reshape([1, -1, *[1] * (rank - 2)])


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _tensor(value: Padded | None) -> Tensor | None:
    return None if value is None else value.tensor


def _batch_dims(value: Padded) -> list[int]:
    return [0, *range(2, value.ndim)]


@rule(aten._native_batch_norm_legit_no_training.default)
def _frozen_batch_norm(call: Call) -> list[Padded]:
    return _results(call.run(), _solid(call["input"]))


def _results(results: Sequence[Tensor], layout: Layout) -> list[Padded]:
    """Wrap the first result with `layout`, and each of the others as a vector of channels."""
    channels = layout[1:2]
    return [
        Padded(results[0], layout),
        *(Padded(r, channels if r.shape[0] != 0 else (dim_of(0),)) for r in results[1:]),
    ]


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)
def _batch_norm(call: Call) -> list[Padded]:
    """Statistics are over the n true elements; the running variance takes n / (n - 1) of their variance."""
    x = call["input"]
    layout = _solid(x)
    if not call["training"]:
        return _results(call.run(), layout)
    dims = _batch_dims(x)
    count: Any = call.padding.count(x, dims)
    mean, squares = moments(call, x, dims)
    inverse = torch.rsqrt(squares / count + call["eps"])
    weight, bias = (_channels(_tensor(call[n]), x.ndim) for n in ("weight", "bias"))
    result = _affine((wide(x.tensor) - mean) * inverse, weight, bias).to(x.tensor.dtype)
    outputs = [result, mean.flatten(), inverse.flatten()]
    if call.operator is aten._native_batch_norm_legit_functional.default:
        new = (mean.flatten(), (squares / (count - 1)).flatten())
        momentum = call["momentum"]
        running = (call["running_mean"].tensor, call["running_var"].tensor)
        outputs += [old * (1 - momentum) + n * momentum for old, n in zip(running, new, strict=True)]
    elif call.arguments.get("running_mean") is not None:
        raise NoRule("updates running statistics in place; only the functional form has a padding rule")
    return _results(outputs, layout)


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: Call) -> list[Padded | None]:
    x = call["input"]
    dy = call.like("grad_out", x.layout)
    layouts = (_solid(x), x.layout[1:2], x.layout[1:2])
    if not call["train"]:
        return _masked(call, call.run(**call.zeros("grad_out", "input")), layouts)
    dims = _batch_dims(x)
    weight = _channels(_tensor(call["weight"]), x.ndim)
    mean, inverse = (_channels(call[n].tensor, x.ndim) for n in ("save_mean", "save_invstd"))
    assert mean is not None
    assert inverse is not None
    dx, scaled = _gradient(call, Padded(wide(dy.tensor), dy.layout), x, mean, inverse, dims)
    filled = wide(call.padding.fill(dy, 0))
    results = (_affine(dx, weight, None).to(x.tensor.dtype), (filled * scaled).sum(dims), filled.sum(dims))
    return _masked(call, results, layouts)


@rule(torch.ops.irongrad.sync_batch_norm.default)
def _sync_batch_norm(call: Call) -> list[Padded]:
    """Each rank contributes its true elements."""
    x = call["x"]
    dims = _batch_dims(x)
    mean, squares = (v.flatten() for v in moments(call, x, dims))
    found = pooled(mean, squares, call.padding.count(x, dims))
    weight, bias, *running = (_tensor(call[n]) for n in ("weight", "bias", "running_mean", "running_var"))
    results = normalised(x.tensor, weight, bias, (running[0], running[1]), found, call["momentum"], call["eps"])
    layout = _solid(x)
    channels = layout[1:2]
    return [
        Padded(results[0], layout),
        *(Padded(r, channels if r.shape[0] > 1 else (dim_of(r.shape[0]),)) for r in results[1:]),
    ]


@rule(torch.ops.irongrad.sync_batch_norm_backward.default)
def _sync_batch_norm_backward(call: Call) -> list[Padded]:
    x = call["x"]
    dy = call.like("grad", x.layout)
    mean, inverse = (_channels(call[n].tensor, x.ndim) for n in ("mean", "inverse"))
    assert mean is not None
    assert inverse is not None
    scaled = call.padding.fill(Padded((wide(x.tensor) - mean) * inverse, x.layout), 0)
    filled = wide(call.padding.fill(dy, 0))
    dtype, dims = x.tensor.dtype, _batch_dims(x)
    own, count = call["inverse"].tensor, call["count"].tensor
    results = gradients(filled, scaled, _tensor(call["weight"]), own, count, dims, dtype)
    layouts = (_solid(x), x.layout[1:2], x.layout[1:2])
    return [Padded(r, layout) for r, layout in zip(results, layouts, strict=True)]


def _masked(call: Call, results: Sequence[Tensor | None], layouts: Sequence[Layout]) -> list[Padded | None]:
    """The results that `output_mask` asks for; the others are None."""
    asked = zip(results, layouts, call["output_mask"], strict=True)
    return [Padded(r, layout) if wanted and r is not None else None for r, layout, wanted in asked]


@rule(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> list[Padded]:
    x = call["input"]
    layout = _solid(x)
    dims = list(range(x.ndim - len(call["normalized_shape"]), x.ndim))
    outer = (*layout[: dims[0]], *[dim_of(1)] * len(dims))
    if not x.padded(dims):
        return [Padded(r, shape) for r, shape in zip(call.run(), (layout, outer, outer), strict=True)]
    mean, squares = moments(call, x, dims)
    inverse = torch.rsqrt(squares / call.padding.count(x, dims) + call["eps"])
    result = _affine((wide(x.tensor) - mean) * inverse, _tensor(call["weight"]), _tensor(call["bias"]))
    return [Padded(result.to(x.tensor.dtype), layout), Padded(mean, outer), Padded(inverse, outer)]


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Call) -> list[Padded | None]:
    x = call["input"]
    dy = call.like("grad_out", x.layout)
    dims = list(range(x.ndim - len(call["normalized_shape"]), x.ndim))
    inner = x.layout[dims[0] :]
    layouts = (_solid(x), inner, inner)
    if not x.padded(dims):
        return _masked(call, call.run(**call.zeros("grad_out", "input", "mean", "rstd")), layouts)
    if call["weight"] is not None:
        raise NoRule("with a weight for each element of a padded dimension has no padding rule")
    incoming = Padded(wide(dy.tensor), dy.layout)
    dx, _ = _gradient(call, incoming, x, call["mean"].tensor, call["rstd"].tensor, dims)
    return _masked(call, (dx.to(x.tensor.dtype), None, None), layouts)


@rule(aten._fused_rms_norm.default)
def _rms_norm(call: Call) -> list[Padded]:
    """Only a program of evaluation has this operator."""
    x = call["input"]
    layout = _solid(x)
    dims = list(range(x.ndim - len(call["normalized_shape"]), x.ndim))
    outer = (*layout[: dims[0]], *[dim_of(1)] * len(dims))
    if not x.padded(dims):
        return [Padded(r, shape) for r, shape in zip(call.run(), (layout, outer), strict=True)]
    filled = wide(call.padding.fill(x, 0, dims))
    eps = torch.finfo(x.tensor.dtype).eps if call["eps"] is None else call["eps"]
    inverse = torch.rsqrt(filled.square().sum(dims, keepdim=True) / call.padding.count(x, dims) + eps)
    result = _affine(wide(x.tensor) * inverse, _tensor(call["weight"]), None)
    return [Padded(result.to(x.tensor.dtype), layout), Padded(inverse, outer)]


def _grouped(value: Padded, groups: int) -> Padded:
    """Reshape (batch, channel, …) to (batch, group, channel in the group, …)."""
    batch, channels, *rest = value.layout
    inner = int(size_of(channels)) // groups
    shape = [value.tensor.shape[0], groups, inner, *value.tensor.shape[2:]]
    return Padded(value.tensor.reshape(shape), (batch, dim_of(groups), dim_of(inner), *rest))


@rule(aten.native_group_norm.default)
def _group_norm(call: Call) -> list[Padded]:
    x = call["input"]
    layout = _solid(x)
    statistics = (layout[0], dim_of(call["group"]))
    if x.padded(1):
        raise NoRule("groups channels, some of which are padding")
    if not x.padded(list(range(2, x.ndim))):
        return [Padded(r, shape) for r, shape in zip(call.run(), (layout, statistics, statistics), strict=True)]
    grouped = _grouped(x, call["group"])
    dims = list(range(2, grouped.ndim))
    mean, squares = moments(call, grouped, dims)
    inverse = torch.rsqrt(squares / call.padding.count(grouped, dims) + call["eps"])
    scaled = ((wide(grouped.tensor) - mean) * inverse).reshape(x.tensor.shape)
    weight, bias = (_channels(_tensor(call[n]), x.ndim) for n in ("weight", "bias"))
    result = _affine(scaled, weight, bias).to(x.tensor.dtype)
    return [Padded(result, layout), *(Padded(v.flatten(1), statistics) for v in (mean, inverse))]


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(call: Call) -> list[Padded | None]:
    x = call["input"]
    dy = call.like("grad_out", x.layout)
    channels = x.layout[1:2]
    layouts = (_solid(x), channels, channels)
    if not x.padded(list(range(2, x.ndim))):
        return _masked(call, call.run(**call.zeros("grad_out", "input", "mean", "rstd")), layouts)
    weight = _channels(_tensor(call["weight"]), x.ndim)
    scaled_dy = Padded(_affine(wide(dy.tensor), weight, None), dy.layout)
    grouped, incoming = _grouped(x, call["group"]), _grouped(scaled_dy, call["group"])
    dims = list(range(2, grouped.ndim))
    mean, inverse = (call[n].tensor.reshape([*call[n].tensor.shape, *[1] * len(dims)]) for n in ("mean", "rstd"))
    dx, scaled = _gradient(call, incoming, grouped, mean, inverse, dims)
    filled = wide(call.padding.fill(dy, 0))
    over = _batch_dims(x)
    dw = (filled * scaled.reshape(x.tensor.shape)).sum(over)
    return _masked(call, (dx.reshape(x.tensor.shape).to(x.tensor.dtype), dw, filled.sum(over)), layouts)
