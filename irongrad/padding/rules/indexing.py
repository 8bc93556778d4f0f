"""Padding rules of reads and writes at indices: indices in padding do not affect true elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from irongrad.padding.layout import Dim, Layout, broadcast, dim_of, is_padded, size_of, solid
from irongrad.padding.padded import Padded, Padding
from irongrad.padding.registry import Call, NoRule, aten, rule


def _located(padding: Padding, dim: Dim, index: Tensor) -> Tensor:
    """Map indices, which may count from the true end, to positions in the bucket."""
    if not is_padded(dim):
        return index
    size: Any = padding.sizes.true(size_of(dim))
    return padding.locate(dim, torch.where(index < 0, index + size, index))


@rule(aten.embedding.default)
def _embedding(call: Call) -> Padded:
    indices = call["indices"]
    if call["weight"].padded(0):
        raise NoRule("looks up a table whose rows are padded")
    result = call.run(indices=call.padding.fill(indices, 0))
    return Padded(result, (*map(solid, indices.layout), *call["weight"].layout[1:]))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Padded:
    """Padding has the index 0 and a zero gradient, so it adds zeros to the first row."""
    if call["scale_grad_by_freq"]:
        raise NoRule("with scale_grad_by_freq=True counts how often each index occurs, which has no padding rule")
    rows = call["indices"]
    gradient = call.like("grad_output", (*rows.layout, *call["grad_output"].layout[rows.ndim :]))
    filled = call.padding.fill(gradient, 0, list(range(rows.ndim)))
    result = call.run(grad_output=filled, indices=call.padding.fill(rows, 0))
    return Padded(result, (dim_of(result.shape[0]), *gradient.layout[rows.ndim :]))


@rule(aten.index_select.default)
def _index_select(call: Call) -> Padded:
    value, index = call["self"], call["index"]
    d = call["dim"] % value.ndim
    rows = _located(call.padding, value.layout[d], call.padding.fill(index, 0))
    return Padded(call.run(index=rows), (*value.layout[:d], *map(solid, index.layout), *value.layout[d + 1 :]))


@rule(aten.gather.default)
def _gather(call: Call) -> Padded:
    value, index = call["self"], call["index"]
    d = call["dim"] % value.ndim
    _check_beside(value, index, d)
    rows = _located(call.padding, value.layout[d], call.padding.fill(index, 0))
    return Padded(call.run(index=rows), tuple(map(solid, index.layout)))


def _check_beside(value: Padded, index: Padded, d: int) -> None:
    """Refuse arguments whose elements do not correspond one to one in the dimensions other than `d`.

    Raises:
        NoRule: the padding of one of these dimensions differs.
    """
    for i, (a, b) in enumerate(zip(value.layout, index.layout, strict=True)):
        if i != d and solid(a) != solid(b) and (len(a) > 1 or len(b) > 1):
            raise NoRule("pairs dimensions whose padding lies in different places")


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(call: Call) -> Padded:
    """Write padding to an extra row, and then cut the row off."""
    value, index = call["self"], call["index"]
    d = call["dim"] % value.ndim
    _check_beside(value, index, d)
    extent = value.tensor.shape[d]
    if isinstance(call.arguments.get("src"), Padded):
        call.like("src", index.layout)
    rows = _located(call.padding, value.layout[d], call.padding.fill(index, 0))
    valid = call.padding.valid(index)
    target = value.tensor
    if valid is not None:
        rows = torch.where(valid, rows, extent)
        target = torch.cat([target, torch.ones_like(target.narrow(d, 0, 1))], d)
    result = call.run(self=target, index=rows)
    return Padded(result.narrow(d, 0, extent), tuple(map(solid, value.layout)))


@rule(aten.index_add.default)
def _index_add(call: Call) -> Padded:
    value, index, source = call["self"], call["index"], call["source"]
    d = call["dim"] % value.ndim
    rows = _located(call.padding, value.layout[d], call.padding.fill(index, 0))
    shared = index.layout if index.ndim else (dim_of(1),)
    aligned = call.like("source", (*source.layout[:d], *shared, *source.layout[d + 1 :]))
    return Padded(call.run(index=rows, source=call.padding.fill(aligned, 0, d)), tuple(map(solid, value.layout)))


def _bucket_indices(call: Call, value: Padded) -> tuple[list[Tensor | None], Layout, list[int]]:
    """The indices as positions in the bucket, their broadcast layout, and the dimensions that they index."""
    indices = call["indices"]
    used = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].tensor.dtype in (torch.bool, torch.uint8) for d in used):
        raise NoRule("with a mask as an index has no padding rule")
    layout = broadcast([indices[d].layout for d in used])
    if layout is None:
        raise NoRule("with indices whose padding differs has no padding rule")
    rows = [
        None if index is None else _located(call.padding, value.layout[d], call.padding.fill(index, 0))
        for d, index in enumerate(indices)
    ]
    return rows, tuple(map(solid, layout)), used


def _indexed_layout(value: Padded, chosen: Layout, used: list[int]) -> tuple[Layout, int]:
    """The layout of `value[indices]`, and the position in it of the first dimension of the indices."""
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    rest = [dim for d, dim in enumerate(value.layout) if d not in used]
    return (*rest[:at], *chosen, *rest[at:]), at


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Padded:
    value = call["self"]
    rows, chosen, used = _bucket_indices(call, value)
    return Padded(call.run(indices=rows), _indexed_layout(value, chosen, used)[0])


def _align_values(call: Call, chosen: Layout) -> None:
    """Give the written values the same padding as their indices."""
    values, used = call["values"], [d for d, index in enumerate(call["indices"]) if index is not None]
    layout, at = _indexed_layout(call["self"], chosen, used)
    if values.ndim == len(layout):
        call.like("values", (*values.layout[:at], *chosen, *values.layout[at + len(chosen) :]))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Padded:
    """Write padding to an extra row, and then cut the row off."""
    value = call["self"]
    rows, chosen, used = _bucket_indices(call, value)
    _align_values(call, chosen)
    first, extent = used[0], value.tensor.shape[used[0]]
    valid = call.padding.valid(Padded(torch.zeros([call.padding.extent(d) for d in chosen]), chosen))
    target = value.tensor
    if valid is not None:
        rows[first] = torch.where(valid, rows[first], extent)
        target = torch.cat([target, torch.zeros_like(target.narrow(first, 0, 1))], first)
    result = call.run(self=target, indices=rows)
    return Padded(result.narrow(first, 0, extent), tuple(map(solid, value.layout)))
