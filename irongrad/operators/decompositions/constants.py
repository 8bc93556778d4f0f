"""Values that are known when a graph is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def constant(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Create a constant of the graph.

    It is created outside of every dispatch mode. Under tracing, `torch.tensor` leaves in-place operators on the
    constant in the graph.

    Args:
        values: a number, or nested sequences of numbers.
        dtype: the dtype of the constant.
    """
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)


@decomposes(aten.full.default)
def _full(size: Sequence[int], value: float, *, dtype: torch.dtype | None = None, **kwargs: object) -> torch.Tensor:
    """Compute a uint8 tensor from a range.

    torch-mlir 20261001 gives a uint8 constant another element type, which its verifier then rejects.
    """
    if dtype is not torch.uint8:
        return NotImplemented
    byte = torch.arange(int(value), int(value) + 1, dtype=torch.int32).to(torch.uint8)
    return byte.expand(list(size)) if size else byte.squeeze(0)


@decomposes(aten.zeros.default)
def _zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **kwargs: object) -> torch.Tensor:
    if dtype is not torch.uint8:
        return NotImplemented
    return aten.full.default(size, 0, dtype=dtype)


@decomposes(aten.empty_permuted.default)
def _empty_permuted(
    size: Sequence[int], physical_layout: Sequence[int], *, dtype: torch.dtype | None = None, **kwargs: object
) -> torch.Tensor:
    """Ignore the layout: a compiled tensor has no strides."""
    return aten.empty.memory_format(size, dtype=dtype)


@decomposes(aten.arange.start_step)
def _arange(*bounds: float, dtype: torch.dtype | None = None, **kwargs: object) -> torch.Tensor:
    """Compute 8-bit ranges, which `eye` contains, in int32: torch-mlir 20261001 crashes on them."""
    if dtype not in (torch.int8, torch.uint8):
        return NotImplemented
    return torch.arange(*bounds, dtype=torch.int32).to(dtype)
