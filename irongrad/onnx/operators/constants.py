"""Operators that create tensors (constants, ranges, one-hot rows, random numbers), and losses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.dtypes import torch_dtype
from irongrad.onnx.registry import Call, Static, Value, operator, tensor


@operator("ConstantOfShape")
def constant_of_shape(call: Call, shape: Value) -> Tensor | Static:
    """Return a tensor filled with one number; an integer tensor is known without data."""
    fill = np.asarray(call.get("value", np.zeros(1, np.float32))).reshape(-1)
    sizes = call.ints(shape, "a shape")
    if fill.dtype.kind in "iub" and all(isinstance(s, int) for s in sizes):
        return np.full(sizes, fill[0], fill.dtype)
    return torch.full(sizes, fill[0].item(), dtype=torch.from_numpy(fill).dtype)


@operator("Range")
def range_of(call: Call, start: Value, limit: Value, delta: Value) -> Tensor:
    """Return the numbers from `start` up to, but not including, `limit`."""
    first, last, step = (call.number(v, 0, "a limit") for v in (start, limit, delta))
    return torch.arange(first, last, step, dtype=tensor(start).dtype)


@operator("EyeLike")
def eye_like(call: Call, x: Value) -> Tensor:
    """Return ones on a diagonal, and zeros elsewhere."""
    value = tensor(x)
    dtype = torch_dtype(call.get("dtype", 0)) or value.dtype
    rows, columns = torch.arange(value.shape[0])[:, None], torch.arange(value.shape[1])
    return (columns - rows == call.get("k", 0)).to(dtype)


@operator("OneHot")
def one_hot(call: Call, indices: Value, depth: Value, values: Value) -> Tensor:
    """Return `values[1]` at the index and `values[0]` elsewhere; negative indices count from the end."""
    count, index, pair = int(call.number(depth, 1, "a depth")), tensor(indices), tensor(values)
    axis = call.get("axis", -1)
    places = torch.arange(count).to(index.dtype)
    wrapped = torch.where(index < 0, index + count, index)
    hot = (wrapped.unsqueeze(-1) == places).movedim(-1, axis)
    return torch.where(hot, pair[1], pair[0])


@operator("RandomNormalLike", "RandomUniformLike")
def random_like(call: Call, x: Value) -> Tensor:
    """Return random numbers in the shape of x."""
    value = tensor(x)
    if call.node.operator == "RandomNormalLike":
        return torch.randn_like(value) * call.get("scale", 1.0) + call.get("mean", 0.0)
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return torch.rand_like(value) * (high - low) + low


@operator("NegativeLogLikelihoodLoss")
def nll_loss(call: Call, x: Value, target: Value, weight: Value | None = None) -> Tensor:
    """Compute the negative log-likelihood loss from log-probabilities by class."""
    return functional.nll_loss(
        tensor(x),
        tensor(target).long(),
        tensor(weight) if weight is not None else None,
        ignore_index=call.get("ignore_index", -100),
        reduction=call.get("reduction", "mean"),
    )


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call, x: Value, target: Value, weight: Value | None = None) -> list[Tensor]:
    """Compute the cross-entropy loss from logits by class; return it and the log-probabilities."""
    logarithms = functional.log_softmax(tensor(x), 1)
    return [nll_loss(call, logarithms, target, weight), logarithms]
