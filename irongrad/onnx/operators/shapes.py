"""Operators that move values: reshapes, slices and concatenations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.registry import Call, Static, Value, operator, tensor

_FAR = 2**31 - 1  # a place that is beyond every dimension, as exporters write it


@operator("Reshape")
def reshape(call: Call, x: Value, shape: Value | None = None) -> Tensor:
    """Reshape; a size of 0 keeps the old size, and -1 is inferred."""
    value = tensor(x)
    wanted = call.option(shape, "shape") or []
    kept = bool(call.get("allowzero", 0))
    return value.reshape(
        [value.shape[i] if isinstance(s, int) and s == 0 and not kept else s for i, s in enumerate(wanted)]
    )


@operator("Flatten")
def flatten(call: Call, x: Value) -> Tensor:
    """Reshape to two dimensions."""
    value, axis = tensor(x), call.get("axis", 1)
    axis = axis % value.ndim if axis < 0 else axis
    if axis == 0:
        return value.reshape(1, -1)
    return value.reshape(-1, 1) if axis == value.ndim else value.flatten(axis).flatten(0, axis - 1)


@operator("Transpose")
def transpose(call: Call, x: Value) -> Tensor:
    """Permute the dimensions; without a given order, reverse them."""
    value = tensor(x)
    return value.permute(call.get("perm") or list(reversed(range(value.ndim))))


@operator("Squeeze")
def squeeze(call: Call, x: Value, axes: Value | None = None) -> Tensor:
    """Remove dimensions of size 1, the given ones or all."""
    given = call.option(axes, "axes")
    return tensor(x).squeeze(tuple(given)) if given else tensor(x).squeeze()


@operator("Unsqueeze")
def unsqueeze(call: Call, x: Value, axes: Value | None = None) -> Tensor:
    """Insert dimensions of size 1, which are numbered as in the result."""
    value, given = tensor(x), call.option(axes, "axes") or []
    rank = value.ndim + len(given)
    for axis in sorted(a % rank for a in given):
        value = value.unsqueeze(axis)
    return value


@operator("Concat")
def concat(call: Call, *values: Value) -> Tensor:
    """Concatenate along an axis."""
    return torch.cat([tensor(v) for v in values], call.get("axis", 0))


@operator("Split")
def split(call: Call, x: Value, sizes: Value | None = None) -> list[Tensor]:
    """Split into parts of given sizes, or into equal parts, of which the last may be smaller."""
    value, axis = tensor(x), call.get("axis", 0)
    given = call.option(sizes, "split")
    if given is None:
        count = call.get("num_outputs", len(call.node.outputs))
        given = -(-value.shape[axis] // count)
    return list(value.split(given, axis))


@operator("Slice")
def slice_of(call: Call, x: Value, *given: Value) -> Tensor:
    """Take slices along axes; steps may be negative."""
    value = tensor(x)
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (call.option(given[i] if i < len(given) else None, n) for i, n in enumerate(names))
    assert starts is not None
    assert ends is not None
    for start, end, axis, step in zip(
        starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True
    ):
        value = _sliced(value, start, end, axis, step)
    return value


def _sliced(x: Tensor, start: Any, end: Any, axis: int, step: int) -> Tensor:
    if step < 0:
        size = x.shape[axis]
        first = _from_end(size, start)
        if isinstance(first, int) and isinstance(size, int):
            first = min(first, size - 1)
        x, start, end, step = x.flip(axis), first, _from_end(size, end), -step
    index: list[Any] = [slice(None)] * x.ndim
    index[axis] = slice(start, None if isinstance(end, int) and end >= _FAR else end, step)
    return x[tuple(index)]


def _from_end(size: Any, place: Any) -> Any:
    """A place in a dimension, counted in the reversed dimension."""
    if isinstance(place, int) and abs(place) >= _FAR:
        return 0 if place > 0 else _FAR
    return -1 - place if place < 0 else torch.sym_max(size - 1 - place, 0)


@operator("Pad")
def pad(
    call: Call, x: Value, pads: Value | None = None, fill: Value | None = None, axes: Value | None = None
) -> Tensor:
    """Pad with a number, the edge, the reflection or the opposite side; negative pads cut elements off."""
    value = tensor(x)
    given = call.option(pads, "pads") or []
    chosen = call.option(axes, "axes") or list(range(value.ndim))
    around = {a % value.ndim: (given[i], given[i + len(chosen)]) for i, a in enumerate(chosen)}
    mode = call.get("mode", "constant")
    if mode == "constant":
        flat = [p for axis in reversed(range(value.ndim)) for p in around.get(axis, (0, 0))]
        return functional.pad(value, flat, value=call.number(fill, call.get("value", 0.0), "a value"))
    for axis, (before, after) in around.items():
        size = value.shape[axis]
        if before or after:
            value = value.index_select(axis, torch.from_numpy(_border(mode, size, before, after)))
    return value


def _border(mode: str, size: int, before: int, after: int) -> Static:
    """Return the source index of each element of a padded dimension."""
    added = (max(before, 0), max(after, 0))
    places: Static = np.pad(np.arange(size), added, mode=mode)  # type: ignore[call-overload]
    return places[max(-before, 0) : None if after >= 0 else after].copy()


@operator("Expand")
def expand(call: Call, x: Value, shape: Value) -> Tensor:
    """Broadcast to a shape; where the shape has size 1, the size of x stays."""
    value = tensor(x)
    wanted = call.ints(shape, "a shape")
    rank = max(value.ndim, len(wanted))
    mine = [1] * (rank - value.ndim) + list(value.shape)
    theirs = [1] * (rank - len(wanted)) + wanted
    return value.expand([m if isinstance(t, int) and t == 1 else t for m, t in zip(mine, theirs, strict=True)])


@operator("Tile")
def tile(call: Call, x: Value, repeats: Value) -> Tensor:
    """Repeat along every dimension."""
    return tensor(x).repeat(call.ints(repeats, "repeats"))


@operator("Shape")
def shape_of(call: Call, x: Value) -> Static:
    """Return the sizes, which are known without data."""
    sizes = list(x.shape)[call.get("start", 0) : call.get("end", x.ndim)]
    plain = all(isinstance(s, int) for s in sizes)
    return np.array(sizes, np.int64 if plain else object)


@operator("Size")
def size_of(call: Call, x: Value) -> Static:
    """Return the number of elements, which is known without data."""
    count: Any = tensor(x).numel()
    return np.array(count, np.int64 if isinstance(count, int) else object)


@operator("DepthToSpace")
def depth_to_space(call: Call, x: Value) -> Tensor:
    """Move channels into spatial blocks."""
    value, block = tensor(x), call.get("blocksize")
    if call.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(value, block)
    n, c, h, w = value.shape
    parts = value.reshape(n, block, block, c // block**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(n, c // block**2, h * block, w * block)


@operator("SpaceToDepth")
def space_to_depth(call: Call, x: Value) -> Tensor:
    """Move spatial blocks into channels."""
    value, block = tensor(x), call.get("blocksize")
    n, c, h, w = value.shape
    if call.get("mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(value, block)
    parts = value.reshape(n, c, h // block, block, w // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(n, c * block**2, h // block, w // block)
