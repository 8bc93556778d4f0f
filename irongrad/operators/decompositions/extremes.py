"""Largest and smallest elements, their indices, and products along a dimension.

As in eager, the index is that of the first of equal elements, and NaN wins over every number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def _register_reduction(op: torch._ops.OpOverload) -> None:
    """Rewrite rank 0, and an empty list of dimensions, which means all: torch-mlir 20261001 accepts neither."""

    @decomposes(op)
    def rewrite(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        if x.ndim == 0:
            return x.clone()
        if not dim:
            return op(x, list(range(x.ndim)), keepdim)
        return NotImplemented


_register_reduction(aten.amax.default)
_register_reduction(aten.amin.default)


def _register_with_index(op: torch._ops.OpOverload, reduction: torch._ops.OpOverload) -> None:
    @decomposes(op)
    def rewrite(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return _value_and_index(reduction, x, dim, keepdim)


_register_with_index(aten.max.dim, aten.amax.default)
_register_with_index(aten.min.dim, aten.amin.default)


def _register_index_only(op: torch._ops.OpOverload, reduction: torch._ops.OpOverload) -> None:
    @decomposes(op)
    def rewrite(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        if dim is None:
            index = _value_and_index(reduction, x.reshape(-1), 0, False)[1]
            return index.reshape([1] * x.ndim) if keepdim else index
        return _value_and_index(reduction, x, dim, keepdim)[1]


_register_index_only(aten.argmax.default, aten.amax.default)
_register_index_only(aten.argmin.default, aten.amin.default)


def _value_and_index(
    reduction: torch._ops.OpOverload, x: torch.Tensor, dim: int, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if x.dtype is torch.bool:
        value, index = _value_and_index(reduction, x.to(torch.uint8), dim, keepdim)
        return value.to(torch.bool), index
    size = x.shape[dim]
    value = reduction(x, [dim], True)
    is_extreme = x == value
    if x.is_floating_point():
        is_extreme = is_extreme | (x != x)
    places = torch.arange(size, device=x.device).reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))
    index = torch.where(is_extreme, places, size).amin(dim, keepdim=keepdim)
    return value if keepdim else value.squeeze(dim), index


@decomposes(aten.prod.dim_int)
def _prod(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is not None and dtype != x.dtype:
        return _prod(x.to(dtype), dim, keepdim)
    if x.ndim == 0:
        return x.clone() if x.is_floating_point() else x.to(torch.int64)
    return NotImplemented
