"""Indices that count from the end: torch-mlir 20261001 scatters to a negative index without wrapping it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.node import Target

aten = torch.ops.aten


def without_negative_indices(target: Target, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator that indexes by tensors, with indices that count from the front; others' own."""
    if target not in (aten.index.Tensor, aten.index_put.default):
        return args
    return (args[0], _from_the_front(args[0], args[1]), *args[2:])


def _from_the_front(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Wrap negative indices; a mask stays as it is and indexes as many dimensions as its rank."""
    result: list[torch.Tensor | None] = []
    dim = 0
    for index in indices:
        if index is None:
            result.append(None)
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            result.append(index)
            dim += index.ndim
        else:
            result.append(torch.where(index < 0, index + tensor.shape[dim], index))
            dim += 1
    return result
