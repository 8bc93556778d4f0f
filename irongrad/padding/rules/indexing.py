"""Reading and writing at indices: none of the padding's is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from irongrad.padding.layout import Dim, Layout, broadcast, dim_of, is_padded, size_of, solid
from irongrad.padding.padded import Padded, Padding
from irongrad.padding.registry import Call, NoRule, aten, rule


def _located(padding: Padding, dim: Dim, index: Tensor) -> Tensor:
    """Places in the bucket of indices that may count from the true end."""
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
    """Padding adds zeros to the first row."""
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
    """Refuse what does not pair the elements of the other dimensions one to one.

    Raises:
        NoRule: their padding differs.
    """
    for i, (a, b) in enumerate(zip(value.layout, index.layout, strict=True)):
        if i != d and solid(a) != solid(b) and (len(a) > 1 or len(b) > 1):
            raise NoRule("pairs dimensions whose padding lies in different places")


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(call: Call) -> Padded:
    """Padding is written to one more row, which is cut off again."""
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


def _tensors(call: Call, value: Padded) -> tuple[list[Tensor | None], Layout, list[int]]:
    """The indices as places in the bucket, their layout when broadcast, and the dimensions that they take."""
    given = call["indices"]
    used = [d for d, index in enumerate(given) if index is not None]
    if any(given[d].tensor.dtype in (torch.bool, torch.uint8) for d in used):
        raise NoRule("with a mask as an index has no padding rule")
    layout = broadcast([given[d].layout for d in used])
    if layout is None:
        raise NoRule("with indices whose padding differs has no padding rule")
    rows = [
        None if index is None else _located(call.padding, value.layout[d], call.padding.fill(index, 0))
        for d, index in enumerate(given)
    ]
    return rows, tuple(map(solid, layout)), used


def _beside(value: Padded, chosen: Layout, used: list[int]) -> tuple[Layout, int]:
    """The layout of `value[indices]`, and where in it the dimensions of the indices begin."""
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    rest = [dim for d, dim in enumerate(value.layout) if d not in used]
    return (*rest[:at], *chosen, *rest[at:]), at


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Padded:
    value = call["self"]
    rows, chosen, used = _tensors(call, value)
    return Padded(call.run(indices=rows), _beside(value, chosen, used)[0])


def _align_values(call: Call, chosen: Layout) -> None:
    """Give the values that are written the padding of their indices."""
    values, used = call["values"], [d for d, index in enumerate(call["indices"]) if index is not None]
    layout, at = _beside(call["self"], chosen, used)
    if values.ndim == len(layout):
        call.like("values", (*values.layout[:at], *chosen, *values.layout[at + len(chosen) :]))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Padded:
    """Padding is written to one more row, which is cut off again."""
    value = call["self"]
    rows, chosen, used = _tensors(call, value)
    _align_values(call, chosen)
    first, extent = used[0], value.tensor.shape[used[0]]
    valid = call.padding.valid(Padded(torch.zeros([call.padding.extent(d) for d in chosen]), chosen))
    target = value.tensor
    if valid is not None:
        rows[first] = torch.where(valid, rows[first], extent)
        target = torch.cat([target, torch.zeros_like(target.narrow(first, 0, 1))], first)
    result = call.run(self=target, indices=rows)
    return Padded(result.narrow(first, 0, extent), tuple(map(solid, value.layout)))
