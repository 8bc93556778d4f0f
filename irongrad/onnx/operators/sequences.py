"""Sequences of tensors: lists in Python, whose lengths and places are known without data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Static, Value, operator, tensor

Sequence = list[Value]


@operator("SequenceEmpty")
def sequence_empty(call: Call) -> list[Sequence]:
    """Nothing yet."""
    return [[]]


@operator("SequenceConstruct")
def sequence_construct(call: Call, *values: Value) -> list[Sequence]:
    """Of the inputs."""
    return [list(values)]


@operator("SplitToSequence")
def split_to_sequence(call: Call, x: Value, sizes: Value | None = None) -> list[Sequence]:
    """Parts along an axis: of given sizes, of one size, or of size 1, whose dimension may be dropped."""
    value, axis = tensor(x), call.get("axis", 0)
    if sizes is None:
        return [list(value.split(1, axis) if call.get("keepdims", 1) else value.unbind(axis))]
    given = call.ints(sizes, "sizes")
    return [list(value.split(given if sizes.ndim else given[0], axis))]


@operator("SequenceInsert")
def sequence_insert(call: Call, values: Sequence, value: Value, place: Value | None = None) -> list[Sequence]:
    """At a place, or behind all others."""
    made = list(values)
    made.insert(call.ints(place, "a place")[0] if place is not None else len(values), value)
    return [made]


@operator("SequenceErase")
def sequence_erase(call: Call, values: Sequence, place: Value | None = None) -> list[Sequence]:
    """Without the one at a place, or the last."""
    made = list(values)
    del made[call.ints(place, "a place")[0] if place is not None else -1]
    return [made]


@operator("SequenceAt")
def sequence_at(call: Call, values: Sequence, place: Value) -> Value:
    """The one at a place; negative ones count from the end."""
    return values[call.ints(place, "a place")[0]]


@operator("SequenceLength")
def sequence_length(call: Call, values: Sequence) -> Static:
    """How many there are."""
    return np.array(len(values), np.int64)


@operator("ConcatFromSequence")
def concat_from_sequence(call: Call, values: Sequence) -> Tensor:
    """All along an axis, or along a new one."""
    join = torch.stack if call.get("new_axis", 0) else torch.cat
    return join([tensor(v) for v in values], call.get("axis"))
