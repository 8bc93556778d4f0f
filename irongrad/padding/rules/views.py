"""Padding rules of views that keep every element: permute, reshape, unsqueeze, squeeze and expand."""

from __future__ import annotations

from typing import Any

from irongrad.padding.layout import Layout, dim_of, joined, layout_of, reshaped
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, aten, rule


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(call: Call) -> Padded:
    value: Padded = call["self"]
    sizes = call.made[0] or ()
    layout = reshaped(value.layout, sizes)
    if layout is None:
        return _gathered(call, value, layout_of(sizes))
    return value.view(value.tensor.reshape([call.padding.sizes.bucket(s) for s in sizes]), layout)


def _gathered(call: Call, value: Padded, layout: Layout) -> Padded:
    """Copy a view that moves true elements within the padding, as when (B, T) is made of the first B * T elements."""
    whole = Padded(value.tensor.flatten(), (joined([axis for dim in value.layout for axis in dim]),))
    places = call.padding.places(layout)
    return Padded(call.padding.take(whole, 0, places.flatten()).reshape(places.shape), layout)


@rule(aten.permute.default)
def _permute(call: Call) -> Padded:
    value: Padded = call["self"]
    return value.view(call.run(), tuple(value.layout[d] for d in value.dims(call["dims"]))) if value.ndim else value


@rule(aten.transpose.int)
def _transpose(call: Call) -> Padded:
    value: Padded = call["self"]
    order = list(range(value.ndim))
    a, b = value.dims([call["dim0"], call["dim1"]])
    order[a], order[b] = b, a
    return value.view(call.run(), tuple(value.layout[d] for d in order))


@rule(aten.t.default, aten.numpy_T.default)
def _t(call: Call) -> Padded:
    value: Padded = call["self"]
    return value.view(call.run(), tuple(reversed(value.layout)))


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Padded:
    value: Padded = call["self"]
    layout = list(value.layout)
    layout.insert(call["dim"] % (len(layout) + 1), dim_of(1))
    return value.view(call.run(), tuple(layout))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> Padded:
    """Keep a named dimension even in a bucket where its size is 1: the graph is the same for every size."""
    value: Padded = call["self"]
    dims = value.dims(call.arguments.get("dim"))
    kept = [d for d, dim in enumerate(value.layout) if d not in dims or dim != dim_of(1)]
    layout = tuple(value.layout[d] for d in kept)
    return value.view(value.tensor.reshape([value.tensor.shape[d] for d in kept]), layout)


@rule(aten.expand.default)
def _expand(call: Call) -> Padded:
    value: Padded = call["self"]
    return Padded(call.run(), _expanded(value.layout, call.made[0] or ()))


def _expanded(layout: Layout, sizes: tuple[Any, ...]) -> Layout:
    before = (dim_of(1),) * (len(sizes) - len(layout)) + layout
    return tuple(
        dim_of(size, uniform=True) if dim == dim_of(1) and size != 1 else dim
        for dim, size in zip(before, sizes, strict=True)
    )
