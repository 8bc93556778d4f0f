"""Padding rules of slices: positions count from the true end, and gradients return to the sliced positions."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from irongrad.padding.layout import Dim, Layout, dim_of, is_padded, size_of
from irongrad.padding.padded import Padded, Padding
from irongrad.padding.registry import Call, NoRule, aten, rule


def _from_front(padding: Padding, place: Any, dim: Dim) -> Any:
    """Convert a position that may count from the true end to one from the front."""
    return size_of(dim) + place if padding.sizes.bucket(place) < 0 else place


def part(padding: Padding, value: Padded, d: int, start: Any, size: Any, step: int = 1) -> Padded:
    """Slice `size` elements of dimension `d` from `start` on, `step` apart.

    Raises:
        NoRule: the bucket has too few elements for the slice.
    """
    dim = value.layout[d]
    count = padding.sizes.bucket(size)
    layout = (*value.layout[:d], dim_of(size), *value.layout[d + 1 :])
    if size_of(dim) == size and step == 1:
        return value
    padding.need(dim, start + (size - 1) * step + 1)
    if isinstance(start, int | sympy.Integer) and len(dim) == 1:
        end = int(start) + (count - 1) * step + 1 if count else int(start)
        if end > padding.extent(dim):
            raise NoRule(f"takes {size} of {size_of(dim)} elements, but the bucket is too small for {count} of them")
        return Padded(aten.slice.Tensor(value.tensor, d, int(start), end, step), layout)
    return Padded(padding.take(value, d, _places(padding, start, count, step)), layout)


def _places(padding: Padding, start: Any, count: int, step: int) -> Tensor:
    first: Any = padding.sizes.true(start)
    return torch.arange(count) * step + first


@rule(aten.slice.Tensor)
def _slice(call: Call) -> Padded:
    value = call["self"]
    d = call["dim"] % value.ndim
    size = (call.made[0] or ())[d]
    return part(
        call.padding, value, d, _from_front(call.padding, call["start"] or 0, value.layout[d]), size, call["step"]
    )


@rule(aten.select.int)
def _select(call: Call) -> Padded:
    value = call["self"]
    d = call["dim"] % value.ndim
    start = _from_front(call.padding, call["index"], value.layout[d])
    one = part(call.padding, value, d, start, sympy.Integer(1))
    return Padded(one.tensor.squeeze(d), one.layout[:d] + one.layout[d + 1 :])


def _slices_of(call: Call, sizes: list[Any]) -> list[Padded]:
    d = call["dim"] % call["self"].ndim
    starts = [sum(sizes[:i], start=0) for i in range(len(sizes))]
    return [part(call.padding, call["self"], d, at, size) for at, size in zip(starts, sizes, strict=True)]


@rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def _split_with_sizes(call: Call) -> list[Padded]:
    return _slices_of(call, list(call["split_sizes"]))


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(call: Call) -> list[Padded]:
    d = call["dim"] % call["self"].ndim
    return _slices_of(call, [(sizes or ())[d] for sizes in call.made])


@rule(aten.unbind.int)
def _unbind(call: Call) -> list[Padded]:
    value = call["self"]
    d = call["dim"] % value.ndim
    if is_padded(value.layout[d]):
        raise NoRule("makes one tensor for each element of a padded dimension")
    return [Padded(r, value.layout[:d] + value.layout[d + 1 :]) for r in call.run()]


def _embedded_in_zeros(call: Call, gradient: Padded, d: int, start: Any, step: int) -> Padded:
    """Zeros of the size before the slice, with the true part of `gradient` at the sliced positions."""
    size = (call.made[0] or ())[d]
    layout: Layout = (*gradient.layout[:d], dim_of(size), *gradient.layout[d + 1 :])
    if size_of(gradient.layout[d]) == size and step == 1:
        return gradient
    filled = call.padding.fill(gradient, 0, d)
    shape = [call.padding.extent(dim) for dim in layout]
    count = filled.shape[d]
    if isinstance(start, int | sympy.Integer):
        zeros = torch.zeros(shape, dtype=filled.dtype)
        end = int(start) + (count - 1) * step + 1 if count else int(start)
        return Padded(aten.slice_scatter.default(zeros, filled, d, int(start), end, step), layout)
    rows = _places(call.padding, start, count, step).clamp(0, shape[d] - 1)
    return Padded(torch.zeros(shape, dtype=filled.dtype).index_add(d, rows, filled), layout)


@rule(aten.as_strided.default)
def _as_strided(call: Call) -> Padded:
    """Return the tensor itself if its sizes and strides stay the same; strides of dimensions of size 1 do not count."""
    value: Padded = call["self"]
    stride: Any = 1
    same = tuple(call.made[0] or ()) == tuple(size_of(dim) for dim in value.layout) and not call["storage_offset"]
    for dim, requested in reversed(list(zip(value.layout, call["stride"], strict=False))):
        same = same and (size_of(dim) == 1 or requested == stride)
        stride = stride * size_of(dim)
    if not same:
        raise NoRule("reads memory with other sizes or strides, which has no padding rule")
    return value


@rule(aten.slice_backward.default)
def _slice_backward(call: Call) -> Padded:
    gradient = call["grad_output"]
    d = call["dim"] % gradient.ndim
    whole = dim_of((call.made[0] or ())[d])
    return _embedded_in_zeros(call, gradient, d, _from_front(call.padding, call["start"], whole), call["step"])


@rule(aten.select_backward.default)
def _select_backward(call: Call) -> Padded:
    gradient = call["grad_output"]
    d = call["dim"] % (gradient.ndim + 1)
    row = Padded(gradient.tensor.unsqueeze(d), (*gradient.layout[:d], dim_of(1), *gradient.layout[d:]))
    whole = dim_of((call.made[0] or ())[d])
    return _embedded_in_zeros(call, row, d, _from_front(call.padding, call["index"], whole), 1)


@rule(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> Padded:
    """Take the elements of `src` inside the slice, and those of `self` elsewhere."""
    value, source = call["self"], call["src"]
    d = call["dim"] % value.ndim
    dim = value.layout[d]
    start: Any = call.padding.sizes.true(_from_front(call.padding, call["start"] or 0, dim))
    if len(dim) > 1:
        raise NoRule("replaces a part of a dimension whose padding lies between true elements")
    count: Any = call.padding.sizes.true(size_of(source.layout[d]))
    steps = torch.arange(call.padding.extent(dim)) - start
    inside = (steps >= 0) & (steps % call["step"] == 0) & (steps // call["step"] < count)
    taken = call.padding.take(source, d, steps // call["step"])
    shape = [-1 if i == d else 1 for i in range(value.ndim)]
    others = call.broadcast(value, Padded(taken, (*source.layout[:d], dim, *source.layout[d + 1 :])))
    return Padded(torch.where(inside.reshape(shape), taken, value.tensor), others)


@rule(aten.select_scatter.default)
def _select_scatter(call: Call) -> Padded:
    value, source = call["self"], call["src"]
    d = call["dim"] % value.ndim
    dim = value.layout[d]
    index: Any = call.padding.sizes.true(_from_front(call.padding, call["index"], dim))
    here = call.padding.locate(dim, torch.as_tensor(index)) == torch.arange(call.padding.extent(dim))
    shape = [-1 if i == d else 1 for i in range(value.ndim)]
    row = Padded(source.tensor.unsqueeze(d), (*source.layout[:d], dim_of(1), *source.layout[d:]))
    return Padded(torch.where(here.reshape(shape), row.tensor, value.tensor), call.broadcast(value, row))
