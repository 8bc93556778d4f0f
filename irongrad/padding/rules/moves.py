"""Padding rules of operators that move elements: true elements go where they go without padding."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from irongrad.padding.layout import Dim, Layout, dim_of, is_padded, size_of, solid
from irongrad.padding.padded import Padded, Padding
from irongrad.padding.registry import Call, NoRule, aten, rule
from irongrad.padding.rules.reductions import in_order


@rule(aten.cat.default)
def _cat(call: Call) -> Padded:
    """Concatenate without the padding between the parts."""
    values = [v for v in call["tensors"] if v.ndim > 1 or size_of(v.layout[0]) != 0]
    d = call["dim"] % values[0].ndim
    others = call.broadcast_layouts([v.layout[:d] + v.layout[d + 1 :] for v in values])
    total = sum((size_of(v.layout[d]) for v in values), start=sympy.Integer(0))
    whole = torch.cat([v.tensor for v in values], d)
    layout = (*others[:d], dim_of(total), *others[d:])
    # If only the last part is padded, plain concatenation puts every true element in its place.
    if all(not is_padded(v.layout[d]) for v in values[:-1]) and len(values[-1].layout[d]) == 1:
        return Padded(whole, layout)
    return Padded(whole.index_select(d, _sources(call.padding, values, d, total)), layout)


def _sources(padding: Padding, values: list[Padded], d: int, total: Any) -> Tensor:
    """For each element of the result, its index in the plain concatenation of the bucket's tensors."""
    places = torch.arange(padding.sizes.bucket(total))
    result = torch.zeros_like(places)
    start: Any = sympy.Integer(0)
    offset = 0
    for value in values:
        dim = value.layout[d]
        first: Any = padding.sizes.true(start)
        result = torch.where(places >= first, padding.locate(dim, places - first) + offset, result)
        start = start + size_of(dim)
        offset += padding.extent(dim)
    return result


@rule(aten.stack.default)
def _stack(call: Call) -> Padded:
    values = call["tensors"]
    layout = list(call.broadcast(*values))
    layout.insert(call["dim"] % (len(layout) + 1), dim_of(len(values)))
    return Padded(call.run(), tuple(layout))


def _true_first(dim: Dim) -> Dim:
    """The dimension as one axis, with all true elements first; `Padding.take` returns them in this order."""
    return dim_of(size_of(dim))


def _reindexed(padding: Padding, value: Padded, d: int, places: Tensor) -> Padded:
    layout = (*value.layout[:d], _true_first(value.layout[d]), *value.layout[d + 1 :])
    return Padded(padding.take(value, d, places), layout)


@rule(aten.flip.default)
def _flip(call: Call) -> Padded:
    value: Padded = call["self"]
    plain = [d for d in value.dims(call["dims"]) if not is_padded(value.layout[d])] if call["dims"] else []
    result = Padded(value.tensor.flip(plain), value.layout)
    for d in value.padded(call["dims"]) if call["dims"] else []:
        dim = value.layout[d]
        last: Any = call.padding.sizes.true(size_of(dim) - 1)
        result = _reindexed(call.padding, result, d, last - torch.arange(call.padding.extent(dim)))
    return result


@rule(aten.roll.default)
def _roll(call: Call) -> Padded:
    value: Padded = call["self"]
    if not call["dims"]:
        raise NoRule("without dims rolls over all elements, some of which are padding")
    result = value
    for shift, d in zip(call["shifts"], value.dims(call["dims"]), strict=True):
        size: Any = call.padding.sizes.true(size_of(value.layout[d]))
        by: Any = call.padding.sizes.true(shift)
        places = (torch.arange(call.padding.extent(value.layout[d])) - by) % size
        result = _reindexed(call.padding, result, d, places)
    return result


@rule(aten.repeat.default)
def _repeat(call: Call) -> Padded:
    value = call["self"]
    extra = len(call["repeats"]) - value.ndim
    dims = [dim_of(1)] * extra + list(value.layout)
    result = Padded(value.tensor.reshape([1] * extra + list(value.tensor.shape)), tuple(dims))
    for d, times in enumerate(call["repeats"]):
        if times == 1:
            continue
        size: Any = call.padding.sizes.true(size_of(dims[d]))
        whole = size_of(dims[d]) * times
        places = torch.arange(call.padding.sizes.bucket(whole)) % size
        layout = (*result.layout[:d], dim_of(whole), *result.layout[d + 1 :])
        result = Padded(call.padding.take(result, d, places), layout)
    return result


@rule(aten.constant_pad_nd.default)
def _constant_pad(call: Call) -> Padded:
    """Fill the bucket's padding with the pad value: it then serves as the padding that the program adds at the end."""
    value, pad = call["self"], call["pad"]
    changed = [value.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] != 0 or pad[2 * i + 1] != 0]
    for d in changed:
        in_order(value, d)
    if any(isinstance(p, sympy.Basic) for p in pad[::2]):
        raise NoRule("with a size of padding at the front that depends on a named dimension has no padding rule")
    result = call.run(self=call.padding.fill(value, call["value"] or 0, changed))
    sizes = call.made[0] or ()
    return Padded(result, tuple(dim_of(sizes[d]) if d in changed else solid(v) for d, v in enumerate(value.layout)))


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Padded:
    value = call["self"]
    in_order(value, -1)
    in_order(value, -2)
    if isinstance(call["diagonal"], sympy.Basic):
        raise NoRule("with a diagonal that depends on a named dimension has no padding rule")
    return Padded(call.run(), tuple(map(solid, value.layout)))


@rule(aten.diagonal.default)
def _diagonal(call: Call) -> Padded:
    return Padded(call.run(), _of_diagonal(call, call["self"].layout))


@rule(aten.diagonal_scatter.default)
def _diagonal_scatter(call: Call) -> Padded:
    value: Padded = call["self"]
    call.like("src", _of_diagonal(call, value.layout))
    return Padded(call.run(), tuple(map(solid, value.layout)))


@rule(aten.diagonal_backward.default)
def _diagonal_backward(call: Call) -> Padded:
    layout = tuple(dim_of(size) for size in call.made[0] or ())
    call.like("grad_output", _of_diagonal(call, layout))
    return Padded(call.run(), layout)


def _of_diagonal(call: Call, layout: Layout) -> Layout:
    """The layout of the diagonal of a tensor of this layout.

    Raises:
        NoRule: the diagonal of the bucket's matrix does not begin with that of the matrix without padding.
    """
    pair = [d % len(layout) for d in (call["dim1"], call["dim2"])]
    one, other = (layout[d] for d in pair)
    others = tuple(solid(v) for d, v in enumerate(layout) if d not in pair)
    if not (is_padded(one) or is_padded(other)):
        rows, columns = (int(size_of(dim)) for dim in (one, other))
        offset = call["offset"]
        return (*others, dim_of(max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)))
    if solid(one) != solid(other) or len(one) > 1:
        raise NoRule("of a matrix that is not square has no padding rule where it is padded")
    _is_main(call)
    return (*others, solid(one))


def _is_main(call: Call) -> None:
    if call["offset"] != 0:
        raise NoRule("with an offset has no padding rule where the matrix is padded")


@rule(aten.diag_embed.default)
def _diag_embed(call: Call) -> Padded:
    value: Padded = call["self"]
    pair = sorted(d % (value.ndim + 1) for d in (call["dim1"], call["dim2"]))
    layout = list(map(solid, value.layout[:-1]))
    size = dim_of((call.made[0] or ())[pair[0]])
    if value.padded(-1):
        in_order(value, -1)
        _is_main(call)
        size = solid(value.layout[-1])
    for d in pair:
        layout.insert(d, size)
    return Padded(call.run(), tuple(layout))


@rule(aten.unfold.default)
def _unfold(call: Call) -> Padded:
    value = call["self"]
    d = call["dimension"] % value.ndim
    in_order(value, d)
    sizes = call.made[0] or ()
    layout = (*value.layout[:d], dim_of(sizes[d]), *value.layout[d + 1 :], dim_of(sizes[-1]))
    return Padded(call.run(), layout)


@rule(aten.unfold_backward.default)
def _unfold_backward(call: Call) -> Padded:
    gradient = call["grad_in"]
    d = call["dim"] % (gradient.ndim - 1)
    result = call.run(grad_in=call.padding.fill(gradient, 0, d))
    sizes = call.made[0] or ()
    return Padded(result, (*gradient.layout[:d], dim_of(sizes[d]), *gradient.layout[d + 1 : -1]))
