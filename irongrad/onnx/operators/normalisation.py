"""Normalisation over a batch, a layer, a group or a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.registry import Call, Value, operator, tensor


@operator("BatchNormalization")
def batch_normalization(call: Call, x: Value, scale: Value, bias: Value, mean: Value, var: Value) -> Any:
    """Normalise with the batch's statistics in training mode, and with the running statistics otherwise.

    Training mode also updates the running statistics. A file that was exported in evaluation mode says nothing of
    training, so PyTorch's rule applies: the running variance is unbiased. If the node itself is one for training
    (`training_mode`), ONNX's rule applies: the running variance is biased. Statistics that the graph computes are no
    running ones, and hold in either mode.
    """
    value, weight, offset, running_mean, running_var = map(tensor, (x, scale, bias, mean, var))
    given = zip(call.node.inputs[3:], (mean, var), strict=True)
    computed = [isinstance(statistic, Tensor) and name not in call.state for name, statistic in given]
    if any(computed) and not call.get("training_mode", 0):
        columns = (1, -1, *[1] * (value.ndim - 2))
        center, spread, factor, shift = (t.reshape(columns) for t in (running_mean, running_var, weight, offset))
        return (value - center) * torch.rsqrt(spread + call.get("epsilon", 1e-5)) * factor + shift
    epsilon, kept = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    for_training = bool(call.get("training_mode", 0))
    if call.training and for_training:
        axes = [0, *range(2, value.ndim)]
        with torch.no_grad():
            found = torch.var_mean(value, axes, correction=0)
            for running, new in ((running_var, found[0]), (running_mean, found[1])):
                running.copy_(running * kept + new * (1 - kept))
        normalised = functional.batch_norm(value, None, None, weight, offset, True, 0.0, epsilon)
    else:
        normalised = functional.batch_norm(
            value, running_mean, running_var, weight, offset, call.training, 1 - kept, epsilon
        )
    return [normalised, running_mean.clone(), running_var.clone()] if call.wants(1) else normalised


@operator("LayerNormalization")
def layer_normalization(call: Call, x: Value, scale: Value, bias: Value | None = None) -> Any:
    """Normalise over all dimensions from `axis` on."""
    value, weight = tensor(x), tensor(scale)
    axis, epsilon = call.get("axis", -1) % value.ndim, call.get("epsilon", 1e-5)
    shape = value.shape[axis:]
    if weight.shape == shape and not call.wants(1):
        return functional.layer_norm(value, shape, weight, tensor(bias) if bias is not None else None, epsilon)
    axes = tuple(range(axis, value.ndim))
    var, mean = torch.var_mean(value, axes, correction=0, keepdim=True)
    inverse = torch.rsqrt(var + epsilon)
    normalised = (value - mean) * inverse * weight
    return [normalised if bias is None else normalised + tensor(bias), mean, inverse]


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def rms_normalization(call: Call, x: Value, scale: Value) -> Tensor:
    """Divide by the root mean square over all dimensions from `axis` on."""
    value = tensor(x)
    axes = tuple(range(call.get("axis", -1) % value.ndim, value.ndim))
    mean = value.square().mean(axes, keepdim=True)
    return value * torch.rsqrt(mean + call.get("epsilon", 1e-5)) * tensor(scale)


@operator("InstanceNormalization")
def instance_normalization(call: Call, x: Value, scale: Value, bias: Value) -> Tensor:
    """Normalise over the spatial dimensions of each channel."""
    value, weight, offset = map(tensor, (x, scale, bias))
    return functional.group_norm(value, value.shape[1], weight, offset, call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_normalization(call: Call, x: Value, scale: Value, bias: Value) -> Tensor:
    """Normalise over groups of channels; the scale is per group before opset 21, and per channel from then on."""
    value, weight, offset = map(tensor, (x, scale, bias))
    groups = call.get("num_groups")
    if call.opset < 21:
        each = value.shape[1] // groups
        weight, offset = weight.repeat_interleave(each), offset.repeat_interleave(each)
    return functional.group_norm(value, groups, weight, offset, call.get("epsilon", 1e-5))


@operator("LRN")
def local_response(call: Call, x: Value) -> Tensor:
    """Normalise by the squares of neighbouring channels."""
    size = call.get("size")
    value = tensor(x)
    alpha, beta, bias = call.get("alpha", 1e-4), call.get("beta", 0.75), call.get("bias", 1.0)
    before = (size - 1) // 2
    squares = functional.pad(value.square(), [0] * 2 * (value.ndim - 2) + [before, size - 1 - before])
    around = squares.unfold(1, size, 1).sum(-1)
    return value / (bias + alpha / size * around) ** beta


@operator("MeanVarianceNormalization")
def mean_variance(call: Call, x: Value) -> Tensor:
    """Normalise to mean 0 and variance 1."""
    value, axes = tensor(x), tuple(call.get("axes", (0, 2, 3)))
    var, mean = torch.var_mean(value, axes, correction=0, keepdim=True)
    return (value - mean) / (torch.sqrt(var) + 1e-9)


@operator("LpNormalization")
def lp_normalization(call: Call, x: Value) -> Tensor:
    """Divide by the norm along an axis; zeros stay zeros."""
    value, axis = tensor(x), call.get("axis", -1)
    norm = torch.linalg.vector_norm(value, call.get("p", 2), axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(value), value / norm.masked_fill(norm == 0, 1))
