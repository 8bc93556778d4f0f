"""Reads of `tensor.data` and assignments to it, as operators that a trace can record.

A trace of `x.data` itself would hold a tensor without an origin. Reading it is `x.detach()`, which shares memory with
`x`, so writes into it are writes into `x`. An assignment is a write of the new values.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from irongrad.diagnostics.source_lines import here
from irongrad.runtime.errors import CaptureError


def read(tensor: Tensor) -> Tensor:
    """Return what stands for `tensor.data`."""
    return tensor.detach()


def assign(module: nn.Module | None, tensor: Tensor, value: Tensor) -> None:
    """Do what stands for `tensor.data = value`.

    Args:
        module: holds the tensors that outlive the forward; None for none.
        tensor: the tensor.
        value: its new values.

    Raises:
        CaptureError: `tensor` would get another shape or dtype, or share memory with a tensor of `module`.
    """
    if _is_same_memory(tensor, value):
        return
    if (tensor.shape, tensor.dtype, tensor.layout) != (value.shape, value.dtype, value.layout):
        raise CaptureError(
            f"{here()}\n  an assignment to .data gives a tensor another shape or dtype. Compiled tensors keep theirs: "
            "make a new tensor, or create this one with that shape and dtype"
        )
    if module is not None and _memory(value) in {_memory(t) for t in _tensors(module)}:
        raise CaptureError(
            f"{here()}\n  an assignment to .data makes two tensors share memory from then on. Write the values into "
            "the tensor instead: a.copy_(b) under torch.no_grad()"
        )
    tensor.detach().copy_(value.detach())


def _tensors(module: nn.Module) -> list[Tensor]:
    return list(itertools.chain(module.parameters(), module.buffers()))


def _memory(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    def placed(tensor: Tensor) -> tuple[object, ...]:
        return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype

    dense = one.layout is other.layout is torch.strided
    return dense and placed(one) == placed(other)
