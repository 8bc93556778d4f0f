"""Activations and dropout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.registry import Call, Value, operator, tensor


@operator("Relu", "Sigmoid", "Softplus", "Softsign", "Mish", "HardSwish")
def plain(call: Call, x: Value) -> Tensor:
    """Apply an activation without options, which PyTorch has under the same name."""
    name = {"HardSwish": "hardswish"}.get(call.node.operator, call.node.operator.lower())
    function = torch.sigmoid if name == "sigmoid" else getattr(functional, name)
    result: Tensor = function(tensor(x))
    return result


@operator("LeakyRelu")
def leaky_relu(call: Call, x: Value) -> Tensor:
    """Return x, but `alpha x` below zero."""
    return functional.leaky_relu(tensor(x), call.get("alpha", 0.01))


@operator("Elu")
def elu(call: Call, x: Value) -> Tensor:
    """Return x, but `alpha (exp(x) - 1)` below zero."""
    return functional.elu(tensor(x), call.get("alpha", 1.0))


@operator("Celu")
def celu(call: Call, x: Value) -> Tensor:
    """Return x, but `alpha (exp(x / alpha) - 1)` below zero."""
    return functional.celu(tensor(x), call.get("alpha", 1.0))


@operator("Selu")
def selu(call: Call, x: Value) -> Tensor:
    """Return `gamma x`, but `gamma alpha (exp(x) - 1)` below zero."""
    alpha, gamma = call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    return gamma * functional.elu(tensor(x), alpha)


@operator("ThresholdedRelu")
def thresholded_relu(call: Call, x: Value) -> Tensor:
    """Return x above `alpha`, else 0."""
    return functional.threshold(tensor(x), call.get("alpha", 1.0), 0.0)


@operator("Shrink")
def shrink(call: Call, x: Value) -> Tensor:
    """Move x towards zero by `bias`; it is 0 for `|x| <= lambd`."""
    value, limit, bias = tensor(x), call.get("lambd", 0.5), call.get("bias", 0.0)
    inner = torch.where(value > limit, value - bias, torch.zeros_like(value))
    return torch.where(value < -limit, value + bias, inner)


@operator("PRelu")
def prelu(call: Call, x: Value, slope: Value) -> Tensor:
    """Return x, but `slope x` below zero; the slope broadcasts to x."""
    value = tensor(x)
    return torch.where(value < 0, tensor(slope) * value, value)


@operator("HardSigmoid")
def hard_sigmoid(call: Call, x: Value) -> Tensor:
    """Return `alpha x + beta`, clamped to [0, 1]."""
    return torch.clamp(tensor(x) * call.get("alpha", 0.2) + call.get("beta", 0.5), 0, 1)


@operator("Gelu")
def gelu(call: Call, x: Value) -> Tensor:
    """Compute GELU with the error function, or with tanh."""
    return functional.gelu(tensor(x), approximate=call.get("approximate", "none"))


@operator("Swish")
def swish(call: Call, x: Value) -> Tensor:
    """Return `x sigmoid(alpha x)`."""
    value = tensor(x)
    return value * torch.sigmoid(call.get("alpha", 1.0) * value)


@operator("Softmax", "LogSoftmax", "Hardmax")
def softmax(call: Call, x: Value) -> Tensor:
    """Normalise along an axis; before opset 13, over that axis and all later ones, as one."""
    value = tensor(x)
    axis = call.get("axis", -1 if call.opset >= 13 else 1)
    if call.opset < 13 and value.ndim:
        flat = value.flatten(axis % value.ndim) if axis % value.ndim < value.ndim - 1 else value
        return _normalised(call, flat, axis % value.ndim).reshape(value.shape)
    return _normalised(call, value, axis)


def _normalised(call: Call, x: Tensor, axis: int) -> Tensor:
    match call.node.operator:
        case "Softmax":
            return torch.softmax(x, axis)
        case "LogSoftmax":
            return torch.log_softmax(x, axis)
        case _:
            return functional.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis).to(x.dtype)


@operator("Dropout")
def dropout(call: Call, x: Value, ratio: Value | None = None, training: Value | None = None) -> list[Tensor]:
    """Drop elements in training mode, whatever mode the model was exported in."""
    value = tensor(x)
    rate = call.number(ratio, call.get("ratio", 0.5), "a ratio")
    if not call.training or rate == 0:
        return [value, torch.ones_like(value, dtype=torch.bool)]
    if call.wants(1):
        kept = torch.rand_like(value) >= rate
        return [value * kept / (1 - rate), kept]
    return [functional.dropout(value, rate)]
