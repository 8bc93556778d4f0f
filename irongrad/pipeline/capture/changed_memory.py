"""Functions that give a tensor other memory, another shape, or a copy of its own: refused, or written as operators.

A trace's tensors have no memory, so PyTorch's own functions fail on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from irongrad.diagnostics.source_lines import here, is_of_a_model
from irongrad.runtime.errors import CaptureError


@contextmanager
def set_refused() -> Iterator[None]:
    """While open, a call of `Tensor.set_` in the model or the loss raises CaptureError; no mode sees that function."""
    own = Tensor.set_

    def checked(input: Tensor, *source: Any, **named: Any) -> Tensor:
        if not is_of_a_model(sys._getframe(1).f_code.co_filename):  # PyTorch makes its fake tensors with it
            return own(input, *source, **named)
        raise CaptureError(
            f"{here()}\n  set_ gives a tensor the memory of another one, and compiled tensors share none. Use the "
            "other tensor itself, or copy its values: a.copy_(b)"
        )

    with mock.patch.object(Tensor, "set_", checked):
        yield


def _resize(input: Tensor, *sizes: Any, **options: Any) -> Tensor:
    size = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    return _of_shape(input, size)


def _resize_as(input: Tensor, other: Tensor, **options: Any) -> Tensor:
    return _of_shape(input, other.shape)


def _of_shape(input: Tensor, size: tuple[Any, ...]) -> Tensor:
    if tuple(input.shape) == tuple(size):
        return input
    raise CaptureError(
        f"{here()}\n  a tensor of shape {tuple(input.shape)} is resized in place, and compiled tensors keep their "
        "shape. Make a new one of the right shape, such as torch.empty(shape) or x.new_empty(shape)"
    )


def _deepcopy(input: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor as eager does: no gradient goes from the copy to the tensor."""
    if input.requires_grad and not input.is_leaf:
        raise CaptureError(
            f"{here()}\n  copy.deepcopy takes no result of a computation, in eager PyTorch either. Use "
            "x.detach().clone()"
        )
    copy = input.detach().clone()
    memo[id(input)] = copy
    return copy


# What stands for each of PyTorch's functions in a trace.
REPLACED: dict[object, Callable[..., Any]] = {
    Tensor.resize_: _resize,
    torch.resize_as_: _resize_as,
    Tensor.resize_as_: _resize_as,
    Tensor.__deepcopy__: _deepcopy,
}
