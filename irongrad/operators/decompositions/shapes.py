"""Views, slices and other changes of shape, and their backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch
from irongrad.operators.decompositions.unknown_sizes import for_every_size, is_known
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
uses_pytorch(
    aten.select_backward,
    aten.slice_backward,
    aten.tril,
    aten.triu,
)


@decomposes(aten.detach_copy.default, aten.detach_.default)
def detach_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: a graph that computes no gradients has nothing to detach from."""
    return aten.alias(tensor)


def _as_view(copy: torch._ops.OpOverload, view: Callable[..., object]) -> None:
    """Decompose a view_copy operator to the view: in a functional graph they are the same."""

    @decomposes(copy)
    def rewrite(*args: object, **kwargs: object) -> object:
        return view(*args, **kwargs)


_as_view(aten.permute_copy.default, aten.permute.default)
_as_view(aten.select_copy.int, aten.select.int)
_as_view(aten.slice_copy.Tensor, aten.slice.Tensor)
_as_view(aten.split_copy.Tensor, torch.split)
_as_view(aten.unbind_copy.int, torch.unbind)
_as_view(aten.view_copy.default, aten.reshape.default)
_as_view(aten.diagonal_copy.default, aten.diagonal.default)
_as_view(aten.as_strided_copy.default, aten.as_strided.default)
_as_view(aten.unfold_copy.default, aten.unfold.default)
_as_view(torch.ops.prims.view_of.default, aten.alias.default)


@decomposes(aten.block_diag.default)
def _block_diag(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    blocks = [torch.atleast_2d(t) for t in tensors]
    width = sum(b.shape[1] for b in blocks)
    dtype = torch.result_type(blocks[0], blocks[0])
    for block in blocks:
        dtype = torch.promote_types(dtype, block.dtype)
    rows, start = [], 0
    for block in blocks:
        end = start + block.shape[1]
        rows.append(aten.constant_pad_nd.default(block.to(dtype), [start, width - end]))
        start = end
    return torch.cat(rows)


# --- strides ------------------------------------------------------------------------------------------------------


@decomposes(aten.as_strided.default)
def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    flat, start = _storage(x)
    places = _places(x, size, stride, storage_offset, start)
    return aten.index_select.default(flat, 0, places.reshape(-1)).reshape(list(size))


@decomposes(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: torch.Tensor,
    values: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    flat, start = _storage(x)
    places = _places(x, size, stride, storage_offset, start)
    written = aten.index_put.default(flat, [places.reshape(-1)], values.reshape(-1))
    order = _outermost_first(x)
    return written.reshape([x.shape[d] for d in order]).permute(_inverse(order))


def _storage(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The elements of `x` in storage order, and the storage offset of the first one.

    A compiled tensor has no storage. Only the elements of `x` itself exist, in the layout that eager gives them.
    """
    dense = x.permute(_outermost_first(x))
    if not dense.is_contiguous():
        raise UnsupportedOpError(
            f"as_strided of a tensor of shape {tuple(x.shape)} and strides {tuple(x.stride())} reads memory that is "
            "not the tensor's own. Call .contiguous() first, or index the tensor"
        )
    return dense.reshape(-1), int(x.storage_offset())


def _outermost_first(x: torch.Tensor) -> list[int]:
    return sorted(range(x.ndim), key=lambda d: (-x.stride(d), d))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda d: order[d])


def _places(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None, start: int
) -> torch.Tensor:
    """The index of the storage element at each place of the view."""
    first = (start if storage_offset is None else storage_offset) - start
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and (first < 0 or last >= x.numel()):
        raise UnsupportedOpError(
            f"as_strided to offset {storage_offset}, shape {tuple(size)} and strides {tuple(stride)} reads memory "
            f"outside its tensor of {x.numel()} elements. Apply it to the whole tensor, not to a part of it"
        )
    places = torch.full(list(size), first, device=x.device)
    for dim, (n, s) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(0, n, device=x.device) * s
        places = places + steps.reshape([n] + [1] * (len(size) - 1 - dim))
    return places


@decomposes(aten.diagonal.default)
def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Gather the elements (i, i + offset): in the flattened matrix, these are every (columns + 1)-th element."""
    planes = x.movedim((dim1, dim2), (-2, -1))
    places = _diagonal_places(planes, offset)
    return aten.index_select.default(planes.flatten(-2), planes.ndim - 2, places)


@decomposes(aten.diagonal_scatter.default)
def _diagonal_scatter(
    x: torch.Tensor, values: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Broadcast each value along its row, and select the broadcast values on the diagonal."""
    planes = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = planes.shape[-2:]
    length = values.shape[-1]
    top = max(-offset, 0)  # the row in which the diagonal starts
    spread = aten.constant_pad_nd.default(values, [top, rows - top - length]).unsqueeze(-1)
    places = torch.arange(columns, device=x.device) - torch.arange(rows, device=x.device).unsqueeze(1)
    return torch.where(places == offset, spread, planes).movedim((-2, -1), (dim1, dim2))


def _diagonal_places(planes: torch.Tensor, offset: int) -> torch.Tensor:
    rows, columns = planes.shape[-2:]
    length = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    start = max(-offset, 0) * columns + max(offset, 0)
    return torch.arange(length, device=planes.device) * (columns + 1) + start


@decomposes(aten.unfold_backward.default)
def _unfold_backward(grad: torch.Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> torch.Tensor:
    """Sum the gradients of all windows that contain an element."""
    if not input_sizes:
        return grad.reshape([])
    dim = dim % len(input_sizes)
    starts = torch.arange(grad.shape[dim], device=grad.device) * step
    places = starts.unsqueeze(1) + torch.arange(size, device=grad.device)
    windows = grad.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return aten.index_add.default(grad.new_zeros(list(input_sizes)), dim, places.reshape(-1), windows)


@decomposes(aten.roll.default)
def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """Put the last elements before the others.

    torch-mlir 20261001's lowering of roll fails verification on a sample of fftshift.
    """
    if not dims:
        return aten.roll.default(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if not is_known(size) or not is_known(shift):
            x = _rolled_by_index(x, shift, dim)
            continue
        last = shift % size if size else 0
        if last:
            x = torch.cat([x.narrow(dim, size - last, last), x.narrow(dim, 0, size - last)], dim)
    return x


def _rolled_by_index(x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
    """Gather the elements: how many go before the others depends on a size that only a call knows."""
    size = x.shape[dim]
    places = torch.remainder(torch.arange(size, device=x.device) - shift, size)
    return aten.index_select.default(x, dim, places)


@decomposes(aten.split_with_sizes.default)
def _split_with_sizes(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """Slice out each part: torch-mlir 20261001 splits into numbers alone, not into sizes that only a call knows."""
    if all(map(is_known, sizes)):
        return NotImplemented
    ends = list(itertools.accumulate(sizes))
    with for_every_size(x.shape[dim]):
        return [aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@decomposes(aten.cat.default)
def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Cast to one dtype first: torch-mlir 20261001 reads a byte above 127 as negative if other operands are floats."""
    return _in_one_dtype(torch.cat, tensors, dim)


@decomposes(aten.stack.default)
def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Cast to one dtype, as `_cat`; stay whole otherwise, because `stack_scalars_first` looks for it."""
    return _in_one_dtype(torch.stack, tensors, dim)


def _in_one_dtype(join: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Cast and join tensors of several dtypes."""
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, dtypes)
    return join([t.to(dtype) for t in tensors], dim)
