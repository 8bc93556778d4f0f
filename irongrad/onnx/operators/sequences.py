"""Sequences of tensors, as Python lists; their lengths and positions are known without data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Static, Value, operator, tensor

Sequence = list[Value]


@operator("SequenceEmpty")
def sequence_empty(call: Call) -> list[Sequence]:
    """Return an empty sequence."""
    return [[]]


@operator("SequenceConstruct")
def sequence_construct(call: Call, *values: Value) -> list[Sequence]:
    """Return a sequence of the inputs."""
    return [list(values)]


@operator("SplitToSequence")
def split_to_sequence(call: Call, x: Value, sizes: Value | None = None) -> list[Sequence]:
    """Split along an axis into parts of given sizes, of one size, or of size 1, whose dimension may be dropped."""
    value, axis = tensor(x), call.get("axis", 0)
    if sizes is None:
        return [list(value.split(1, axis) if call.get("keepdims", 1) else value.unbind(axis))]
    given = call.ints(sizes, "sizes")
    return [list(value.split(given if sizes.ndim else given[0], axis))]


@operator("SequenceInsert")
def sequence_insert(call: Call, values: Sequence, value: Value, place: Value | None = None) -> list[Sequence]:
    """Insert a value at a position, or at the end."""
    changed = list(values)
    changed.insert(call.ints(place, "a place")[0] if place is not None else len(values), value)
    return [changed]


@operator("SequenceErase")
def sequence_erase(call: Call, values: Sequence, place: Value | None = None) -> list[Sequence]:
    """Remove the value at a position, or the last one."""
    changed = list(values)
    del changed[call.ints(place, "a place")[0] if place is not None else -1]
    return [changed]


@operator("SequenceAt")
def sequence_at(call: Call, values: Sequence, place: Value) -> Value:
    """Return the value at a position; negative positions count from the end."""
    return values[call.ints(place, "a place")[0]]


@operator("SequenceLength")
def sequence_length(call: Call, values: Sequence) -> Static:
    """Return the number of values."""
    return np.array(len(values), np.int64)


@operator("ConcatFromSequence")
def concat_from_sequence(call: Call, values: Sequence) -> Tensor:
    """Concatenate all values along an axis, or stack them along a new one."""
    join = torch.stack if call.get("new_axis", 0) else torch.cat
    return join([tensor(v) for v in values], call.get("axis"))
