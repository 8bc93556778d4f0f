"""Masks of dtype uint8, which eager PyTorch takes for boolean ones, and its fake tensors refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# The place of the mask among the arguments of each function, and its name.
_MASKS: dict[object, tuple[int, str]] = {
    torch.where: (0, "condition"),
    Tensor.where: (1, "condition"),
    Tensor.__getitem__: (1, ""),
    Tensor.__setitem__: (1, ""),
}


def as_boolean(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with a boolean mask in place of one of bytes."""
    if function not in _MASKS:
        return args, kwargs
    place, name = _MASKS[function]
    if len(args) > place:
        args = (*args[:place], tree_map_only(Tensor, _boolean, args[place]), *args[place + 1 :])
    elif name in kwargs:
        kwargs = {**kwargs, name: _boolean(kwargs[name])}
    return args, kwargs


def _boolean(mask: Tensor) -> Tensor:
    return mask != 0 if mask.dtype is torch.uint8 and mask.ndim else mask
