"""Gathering and indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten

# As an index, a tensor of these dtypes is a mask.
MASKS = (torch.bool, torch.uint8)


@decomposes(aten.gather.default)
def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:
    if index.numel() == 0:
        return x.new_zeros(index.shape)
    if x.ndim == 0 or index.ndim == 0:
        gathered = aten.gather.default(_at_least_1d(x), 0, _at_least_1d(index))
        return gathered.reshape(index.shape)
    if dim < 0:
        return aten.gather.default(x, dim + x.ndim, index)
    return NotImplemented


@decomposes(aten.index_select.default)
def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if x.ndim == 0:
        return aten.index_select.default(x.reshape(1), 0, index.reshape(-1)).reshape([])
    if dim < 0 or index.ndim == 0:
        return aten.index_select.default(x, dim % x.ndim, index.reshape(-1))
    return NotImplemented


@decomposes(aten.index.Tensor)
def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Widen indices to int64, and merge several index tensors of unknown sizes into one.

    It selects rows of a matrix, which has the indexed dimensions flattened as rows and the other dimensions as columns.
    torch-mlir 20261001 refuses several index tensors of unknown sizes ("index tensors with overlapping dynamic dims",
    TorchToLinalg/IndirectDataMovement.cpp). It accepts any number of index tensors of known sizes.
    """
    wide = in_int64(indices)
    if any(a is not b for a, b in zip(wide, indices, strict=True)):
        return aten.index.Tensor(x, wide)
    dims = [d for d, i in enumerate(indices) if i is not None]
    index_tensors = [i for i in indices if i is not None]
    masks = any(i.dtype in MASKS for i in index_tensors)
    if len(index_tensors) < 2 or masks or all(is_known(size) for i in index_tensors for size in i.shape):
        return NotImplemented
    tensors = torch.broadcast_tensors(*index_tensors)
    shape, others = tensors[0].shape, [d for d in range(x.ndim) if d not in dims]
    rest = [x.shape[d] for d in others]
    rows = x.permute([*dims, *others]).reshape([math.prod(x.shape[d] for d in dims), *rest])
    found = aten.index_select.default(rows, 0, row_of(tensors, [x.shape[d] for d in dims])).reshape([*shape, *rest])
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    place = sum(d < dims[0] for d in others) if adjacent else 0
    return found.movedim(list(range(len(shape))), list(range(place, place + len(shape))))


def in_int64(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Widen index tensors to int64; masks stay as they are.

    torch-mlir 20261001 compares an index of 32 bits with a size of 64 bits ("'arith.cmpi' op requires all operands to
    have the same type"). tests/operators/decompositions/test_index_dtypes.py tells when it is fixed.
    """
    return [i if i is None or i.dtype in (torch.int64, *MASKS) else i.to(torch.int64) for i in indices]


def row_of(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Merge the indices of several dimensions into row-major indices.

    Args:
        indices: an index tensor for each dimension, all of one shape.
        sizes: the sizes of the dimensions.

    Returns:
        The merged indices, flattened to rank 1, in int64.
    """
    row = torch.zeros_like(indices[0], dtype=torch.int64)
    for index, size in zip(indices, sizes, strict=True):
        row = row * size + index
    return row.reshape(-1)


@decomposes(aten.take.default)
def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    places = _from_the_front(index, x.numel()).reshape(-1)
    return aten.index_select.default(x.reshape(-1), 0, places).reshape(index.shape)


def _at_least_1d(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1) if x.ndim == 0 else x


def _from_the_front(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)
