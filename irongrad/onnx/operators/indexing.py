"""Gather by index, and scatter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Value, operator, tensor

# How updates are combined: ONNX's names, and those of scatter_reduce.
_COMBINED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _index(value: Value, size: int) -> Tensor:
    """Return indices as PyTorch takes them: int64, and not negative."""
    index = tensor(value).long()
    if isinstance(value, np.ndarray):
        return index if (value >= 0).all() else torch.where(index < 0, index + size, index)
    return torch.where(index < 0, index + size, index)


@operator("Gather")
def gather(call: Call, x: Value, indices: Value) -> Tensor:
    """Take slices along an axis.

    Indices that are data, such as tokens, are looked up as in an embedding. PyTorch refuses negative ones, and so does
    the compiled step.
    """
    value, axis = tensor(x), call.get("axis", 0) % x.ndim
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        return value.select(axis, int(indices) % value.shape[axis])
    index = _index(indices, value.shape[axis]) if isinstance(indices, np.ndarray) else tensor(indices).long()
    if axis == 0 and value.ndim == 2 and value.is_floating_point():
        return torch.nn.functional.embedding(index, value)
    taken = value.index_select(axis, index.reshape(-1))
    return taken.reshape(*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])


@operator("NonZero")
def non_zero(call: Call, x: Value) -> Tensor:
    """Refuse the places of data; those of values known without data are computed in `irongrad.onnx.static`."""
    raise call.node.unsupported("finds places, whose number depends on data, which is not supported")


@operator("GatherElements")
def gather_elements(call: Call, x: Value, indices: Value) -> Tensor:
    """Take one element for each index."""
    value, axis = tensor(x), call.get("axis", 0)
    return value.gather(axis, _index(indices, value.shape[axis]))


@operator("GatherND")
def gather_nd(call: Call, x: Value, indices: Value) -> Tensor:
    """Take slices, whose first indices are in the last dimension of `indices`; leading dimensions may be shared."""
    value, index = tensor(x), tensor(indices).long()
    shared = call.get("batch_dims", 0)
    grids = [torch.arange(s).reshape([-1] + [1] * (index.ndim - 2 - i)) for i, s in enumerate(value.shape[:shared])]
    parts = [_index(index[..., i], value.shape[shared + i]) for i in range(index.shape[-1])]
    return value[(*grids, *parts)]


@operator("ScatterElements", "Scatter")
def scatter_elements(call: Call, x: Value, indices: Value, updates: Value) -> Tensor:
    """Replace elements, or combine them with the updates."""
    value, axis = tensor(x), call.get("axis", 0)
    index, new = _index(indices, value.shape[axis]), tensor(updates)
    how = call.get("reduction", "none")
    if how == "none":
        return value.scatter(axis, index, new)
    return value.scatter_reduce(axis, index, new, _COMBINED[how], include_self=True)


@operator("ScatterND")
def scatter_nd(call: Call, x: Value, indices: Value, updates: Value) -> Tensor:
    """Replace slices, or combine them with the updates."""
    value, places, new = tensor(x), tensor(indices).long(), tensor(updates)
    depth, how = places.shape[-1], call.get("reduction", "none")
    parts = tuple(_index(places[..., i], value.shape[i]) for i in range(depth))
    if how in ("none", "add"):
        return value.index_put(parts, new, accumulate=how == "add")
    flat = value.reshape(-1, *value.shape[depth:])
    place = torch.zeros_like(parts[0])
    for part, size in zip(parts, value.shape[:depth], strict=True):
        place = place * size + part
    rows = new.reshape(-1, *value.shape[depth:])
    index = place.reshape(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)
    return flat.scatter_reduce(0, index, rows, _COMBINED[how], include_self=True).reshape(value.shape)


@operator("ReverseSequence")
def reverse_sequence(call: Call, x: Value, lengths: Value) -> Tensor:
    """Reverse the first steps of each sequence, as many as its length."""
    value, time, batch = tensor(x), call.get("time_axis", 0), call.get("batch_axis", 1)
    steps = torch.arange(value.shape[time])
    length = tensor(lengths)[:, None]
    source = torch.where(steps < length, length - 1 - steps, steps)
    moved = value.movedim((batch, time), (0, 1))
    index = source.reshape(*source.shape, *[1] * (moved.ndim - 2)).expand(moved.shape)
    return moved.gather(1, index).movedim((0, 1), (batch, time))
