"""Loops over the columns of matrices, whose bodies are the same for every column.

A body receives the column's number as a tensor. It updates one column or row through comparisons with that number, not
by slicing. So one body serves an unrolled loop and a structured loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]

LONGEST_UNROLLED = 1


def repeat(count: int, body: Callable[..., Tensors], carried: Tensors, constants: Tensors = ()) -> Tensors:
    """Apply `carried = body(number, *carried, *constants)` for the numbers from 0 to `count` - 1.

    Args:
        count: the number of iterations.
        body: takes and returns tensors, and captures none from outside.
        carried: the tensors that the body updates. If the first has no elements, nothing is done.
        constants: the tensors that the body only reads.

    Returns:
        The carried tensors after the last iteration.
    """
    if carried[0].numel() == 0:
        return carried
    if count <= LONGEST_UNROLLED:
        for number in range(count):
            carried = body(torch.full((), number, dtype=torch.int64), *carried, *constants)
        return carried
    split = len(carried)

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        return list(body(values[split], *values[:split], *values[split + 1 :]))

    initial = [c.clone(memory_format=torch.contiguous_format) for c in carried]
    return tuple(torch.ops.higher_order.scan(step, initial, [torch.arange(count)], constants))


def column(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Column `number` of matrices, as [..., rows, 1]."""
    return x.index_select(-1, number.reshape(1))


def row(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Row `number` of matrices, as [..., 1, columns]."""
    return x.index_select(-2, number.reshape(1))


def row_numbers(x: torch.Tensor) -> torch.Tensor:
    """The number of each row, as [rows, 1]."""
    return torch.arange(x.shape[-2]).unsqueeze(1)


def column_numbers(x: torch.Tensor) -> torch.Tensor:
    """The number of each column, as [columns]."""
    return torch.arange(x.shape[-1])
