"""Scatters, and writes to indices.

All writes of whole rows become the form that is cheapest for IREE: a vector of row numbers indexes a matrix (or a
vector). The indexed dimensions are the rows of the matrix, the other dimensions its columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from irongrad.graph.recorder import undecomposed
from irongrad.operators.decompositions.indexing import MASKS, in_int64, row_of
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten

_COMBINING = frozenset({aten.scatter_add.default, aten.scatter_reduce.two})

_Indices = Sequence[torch.Tensor | None]


def _with_dim_at_one(op: torch._ops.OpOverload) -> None:
    """Register a rewrite of `op` for torch-mlir 20261001.

    torch-mlir aborts the process on a negative dimension (an assertion), and lacks rank 0.
    """

    @decomposes(op)
    def rewrite(x: torch.Tensor, dim: int, index: torch.Tensor, *args: object, **kwargs: object) -> object:
        """`op` on rank 1 or more, along a dimension that is not negative."""
        if index.numel() == 0:
            return x.clone()
        if x.ndim == 0 or index.ndim == 0:
            rest = [a.reshape(-1) if isinstance(a, torch.Tensor) and op is not aten.scatter.value else a for a in args]
            return op(x.reshape(-1), 0, index.reshape(-1), *rest, **kwargs).reshape(x.shape)
        if dim < 0:
            return op(x, dim + x.ndim, index, *args, **kwargs)
        if op in _COMBINING and not x.is_floating_point():
            combined = _combined_integers(op, x, dim, index, *args, **kwargs)
            if combined is not NotImplemented:
                return combined
        if is_known(x.shape[dim]) and x.shape[dim] == 1:
            # IREE 3.13.0 drops a constant that is scattered to a computed index of size 1 (test_special_values.py).
            with undecomposed():
                return op(x, dim, torch.zeros_like(index), *args, **kwargs)
        sizes_are_known = all(map(is_known, x.shape))
        if sizes_are_known and op is not aten.scatter.value:
            return NotImplemented
        own = x if sizes_are_known else _own(x, index, *(a for a in args if isinstance(a, torch.Tensor)))
        with undecomposed():
            return op(own, dim, _unknown(index, x) if op is aten.scatter.value else index, *args, **kwargs)


for _op in (
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
):
    _with_dim_at_one(_op)


def _combined_integers(
    op: torch._ops.OpOverload, x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Combine booleans as numbers, and round the mean of integers down, as eager does.

    torch-mlir 20261001 adds booleans as numbers of one bit, whose sum 1 + 1 is 0. It rounds a mean towards zero.
    """
    if x.dtype == torch.bool:
        return op(x.long(), dim, index, source.long(), *args, **kwargs).to(torch.bool)
    if args != ("mean",):
        return NotImplemented
    total = op(x, dim, index, source, "sum", **kwargs)
    own = torch.ones_like(x) if kwargs.get("include_self", True) else torch.zeros_like(x)
    count = aten.scatter_add.default(own, dim, index, torch.ones_like(source))
    return torch.div(total, count.clamp(min=1), rounding_mode="floor")


@decomposes(aten.index_put.default)
def _index_put(x: torch.Tensor, indices: _Indices, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """The indexed dimensions become the rows of a matrix, the others its columns (numpy, "Advanced indexing")."""
    if any(i is not None and i.dtype in MASKS for i in indices):
        return put_by_mask(x, indices, values, accumulate)
    if accumulate and x.dtype == torch.bool:
        return aten.index_put.default(x.long(), indices, values.long(), True).to(torch.bool)
    wide = in_int64(indices)
    if any(a is not b for a, b in zip(wide, indices, strict=True)):
        return aten.index_put.default(x, wide, values, accumulate)
    dims = [d for d, i in enumerate(indices) if i is not None]
    tensors = torch.broadcast_tensors(*(i for i in indices if i is not None))
    if x.numel() == 0 or not dims or tensors[0].numel() == 0:
        return x.clone()
    others = [d for d in range(x.ndim) if d not in dims]
    shape = tensors[0].shape
    rows, columns = math.prod(x.shape[d] for d in dims), [x.shape[d] for d in others]
    if x.ndim <= 2 and dims == [0] and rows > 1 and len(shape) == 1 and values.shape == (*shape, *x.shape[1:]):
        if all(map(is_known, x.shape)):
            return NotImplemented
        own = _own(x, tensors[0], values)
        with undecomposed():
            return aten.index_put.default(own, [tensors[0]], values, accumulate)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    place = sum(d < dims[0] for d in others) if adjacent else 0
    full = values.expand([*columns[:place], *shape, *columns[place:]])
    front = full.movedim(list(range(place, place + len(shape))), list(range(len(shape))))
    size = [math.prod(columns)] if columns else []
    order = dims + others
    matrix, new = x.permute(order).reshape([rows, *size]), front.reshape([-1, *size])
    if rows == 1:  # all writes go to the same row, and the last one wins
        written = matrix + new.sum(0, keepdim=True, dtype=x.dtype) if accumulate else new[-1:]
    else:
        row = row_of(tensors, [x.shape[d] for d in dims])
        written = aten.index_put.default(matrix, [row], new, accumulate)
    back = sorted(range(x.ndim), key=lambda d: order[d])
    return written.reshape([x.shape[d] for d in order]).permute(back)


def _own(x: torch.Tensor, *written: torch.Tensor) -> torch.Tensor:
    """Copy `x`, so that IREE cannot give two scatters the same initial buffer.

    IREE 3.13.0 lets scatters into equal zeros of unknown sizes share one buffer, and loses their writes. The gradient
    of `h[rows, a] * h[rows, b]` has such scatters, and was zero. The condition added here is always false, but MLIR
    does not know that. tests/pipeline/guards/test_position_tables.py compiles such a step.
    """
    never = [_first(t).abs() < 0 for t in written]
    return torch.where(torch.stack(never).any(), torch.ones((), dtype=x.dtype), x)


def _unknown(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The index, computed in a way that MLIR does not take for a constant.

    Where indices and values are constants, IREE 3.13.0 computes them when the module is loaded. It may then store
    another result of that kernel for the values: their indices. The condition added here is always false.
    test_special_values.py compiles such a scatter.
    """
    return torch.where(_first(x).abs() < 0, torch.zeros((), dtype=index.dtype), index)


def _first(x: torch.Tensor) -> torch.Tensor:
    number = x.to(torch.int64) if x.dtype == torch.bool else x
    for _ in range(x.ndim):
        number = number.select(0, 0)
    return number


def put_by_mask(x: torch.Tensor, indices: _Indices, values: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """Write where a mask is true: one value to all true elements, or the n-th value to the n-th of them.

    Args:
        x: the tensor to update.
        indices: None for each dimension before the mask, and the mask.
        values: the new values, broadcast to the masked elements.
        accumulate: whether to add the values to the old ones.

    Returns:
        The updated tensor; NotImplemented if there are further indices.
    """
    dims = [d for d, i in enumerate(indices) if i is not None]
    mask = indices[dims[0]]
    assert mask is not None
    if len(dims) > 1:
        return NotImplemented
    first, last = dims[0], dims[0] + mask.ndim
    rest = x.ndim - last
    mask = mask.to(torch.bool)
    spread = mask.reshape([*mask.shape, *[1] * rest])
    counted = values.ndim - 1 - rest  # the dimension of `values` with one entry per true element; negative if none
    if counted >= 0 and values.shape[counted] != 1:
        if mask.numel() == 0 or values.numel() == 0:
            return x.clone()
        places = _nth_true(mask).clamp(0, values.shape[counted] - 1)
        values = aten.index_select.default(values, counted, places)
        values = values.reshape([*values.shape[:counted], *mask.shape, *values.shape[counted + 1 :]])
    elif counted >= 0:
        values = values.reshape([*values.shape[:counted], *[1] * mask.ndim, *values.shape[counted + 1 :]])
    new = x + values if accumulate else values.to(x.dtype)
    return torch.where(spread.expand(x.shape[first:]), new, x)


def _nth_true(mask: torch.Tensor) -> torch.Tensor:
    """For each true element of the flattened `mask`, the number of true elements before it."""
    return aten.cumsum.default(mask.reshape(-1).to(torch.int64), 0) - 1


@decomposes(aten.index_copy.default)
def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _put_rows(x, dim, index, source, accumulate=False)


@decomposes(aten.index_add.default)
def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return _put_rows(x, dim, index, source if alpha == 1 else source * alpha, accumulate=True)


def _put_rows(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, accumulate: bool
) -> torch.Tensor:
    index = index.reshape(-1)
    if x.ndim == 0:
        return aten.index_put.default(x.reshape(1), [index], source.reshape(-1), accumulate).reshape([])
    dim = dim % x.ndim
    rows = source.reshape([*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]])
    return aten.index_put.default(x, [None] * dim + [index], rows.to(x.dtype), accumulate)


@decomposes(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
    if x.ndim == 0:
        return _index_fill(x.reshape(1), 0, index, value).reshape([])
    size = x.shape[dim]
    index = torch.where(index < 0, index + size, index).reshape(-1, 1)
    hit = (index == torch.arange(size, device=x.device)).any(0)
    hit = hit.reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))
    new = value.to(x.dtype) if isinstance(value, torch.Tensor) else torch.full([], value, dtype=x.dtype)
    return torch.where(hit, new, x)


@decomposes(aten.index_reduce.default)
def _index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    if x.ndim == 0:
        x, source, shape = x.reshape(1), source.reshape(-1), x.shape
        return _index_reduce(x, 0, index, source, reduce, include_self=include_self).reshape(shape)
    dim = dim % x.ndim
    spread = index.reshape([-1] + [1] * (x.ndim - 1 - dim)).expand(source.shape)
    name = "mean" if reduce == "mean" else reduce
    return aten.scatter_reduce.two(x, dim, spread, source, name, include_self=include_self)


@decomposes(aten.put.default)
def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    places = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    return aten.index_put.default(x.reshape(-1), [places], source.reshape(-1), accumulate).reshape(x.shape)


@decomposes(aten.masked_scatter.default)
def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    if x.numel() == 0 or source.numel() == 0:
        return x.clone()
    places = _nth_true(mask).clamp(0, source.numel() - 1)
    taken = aten.index_select.default(source.reshape(-1), 0, places).reshape(x.shape)
    return torch.where(mask, taken, x)


@decomposes(aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The n-th source element went to the n-th true place; source elements beyond the last have gradient zero."""
    count = math.prod(sizes)
    mask = mask.expand(grad.shape)
    places = torch.where(mask.reshape(-1), _nth_true(mask), count).clamp(0, count)
    found = aten.index_put.default(grad.new_zeros(count + 1), [places], grad.reshape(-1), False)
    return found[:count].reshape(list(sizes))


@decomposes(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """The gradient of a row is the sum of the output gradients of the positions that looked it up."""
    rows = grad.reshape(-1, grad.shape[-1])
    flat = indices.reshape(-1)
    if padding_idx >= 0:
        rows = torch.where((flat == padding_idx).unsqueeze(1), torch.zeros_like(rows), rows)
    if scale_grad_by_freq:
        uses = aten.index_put.default(rows.new_zeros(num_weights), [flat], rows.new_ones(flat.shape), True)
        rows = rows / aten.index_select.default(uses, 0, flat).unsqueeze(1)
    zeros = rows.new_zeros((num_weights, rows.shape[1]))
    return aten.index_put.default(zeros, [flat], rows, True)


@decomposes(aten.slice_scatter.default)
def _slice_scatter(
    x: torch.Tensor, values: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """Select between two tensors elementwise instead of writing a slice.

    IREE 3.13.0 writes a chain of slices in place, and reads elements that it has already overwritten. Gradients of
    Householder products are wrong then, or IREE ends with "circular dependency: input operation uses partition output".
    Slices with gaps of any size are written into a tensor of zeros that other writes share.
    """
    if step != 1 and all(map(is_known, x.shape)):
        return NotImplemented
    dim, size = dim % x.ndim, x.shape[dim]
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    if step != 1:
        return _with_gaps(x, values, dim, first, step)
    after = first + values.shape[dim]
    if after == first:
        return x
    numbers = torch.arange(size).reshape([-1] + [1] * (x.ndim - 1 - dim))
    padded = aten.constant_pad_nd.default(values, [0, 0] * (x.ndim - 1 - dim) + [first, size - after])
    return torch.where((numbers >= first) & (numbers < after), padded, x)


def _with_gaps(x: torch.Tensor, values: torch.Tensor, dim: int, first: int, step: int) -> torch.Tensor:
    """Select between `x` and the elements of `values`, which go to `first`, `first + step` and so on."""
    behind = x.ndim - 1 - dim
    numbers = torch.arange(x.shape[dim]) - first
    written = (numbers >= 0) & (numbers % step == 0)
    # The others read an element behind the last one, as there may be no value at all.
    padded = aten.constant_pad_nd.default(values, [0, 0] * behind + [0, 1])
    places = torch.where(written, numbers.div(step, rounding_mode="floor"), values.shape[dim])
    return torch.where(written.reshape([-1] + [1] * behind), padded.index_select(dim, places), x)
