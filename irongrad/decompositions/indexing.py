"""Gathering and indexing."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import decomposes, keeps

aten = torch.ops.aten

keeps(aten.stack.default)  # so that `stack_scalars_first` finds it


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


@decomposes(aten.take.default)
def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    places = _from_the_front(index, x.numel()).reshape(-1)
    return aten.index_select.default(x.reshape(-1), 0, places).reshape(index.shape)


def _at_least_1d(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1) if x.ndim == 0 else x


def _from_the_front(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)
