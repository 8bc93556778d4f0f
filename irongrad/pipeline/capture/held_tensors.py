"""Tensors of the model's state that the user's code holds directly, not through a module's attribute.

torch.export exchanges the parameters and buffers that modules hold for tensors without values. A list of parameters, or
a loss that closes over one, still has the tensor itself, which the trace would take for a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_Place: TypeAlias = tuple[dict[str, Tensor | None], str]


class HeldTensors:
    """Finds, for a tensor that the user's code holds, what the module holds in its place now.

    Args:
        module: the module that is traced, before torch.export exchanges its tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[int, _Place] = {}
        self._aliases: dict[tuple[object, ...], _Place] = {}
        for owner in module.modules():
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is not None and _is_plain(tensor):
                        self._places.setdefault(id(tensor), (held, name))
                        self._aliases.setdefault(_memory(tensor), (held, name))

    def exchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with what the module holds now in place of its own tensors."""
        if not any(map(self._concerns, args)) and not any(map(self._concerns, kwargs.values())):
            return args, kwargs
        return tuple(map(self._exchanged, args)), {name: self._exchanged(value) for name, value in kwargs.items()}

    def _concerns(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._concerns, value))
        return _is_plain(value) and self._stand_in(value) is not None

    def _exchanged(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._exchanged, value))
        found = self._stand_in(value) if _is_plain(value) else None
        return found() if found is not None else value

    def _stand_in(self, tensor: Tensor) -> Callable[[], Tensor | None] | None:
        if id(tensor) in self._places:
            held, name = self._places[id(tensor)]
            return lambda: held[name]
        if tensor.numel() and _memory(tensor) in self._aliases:
            other, key = self._aliases[_memory(tensor)]
            return lambda: _detached(other[key])
        return None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return tensor.detach() if tensor is not None else None


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor with memory."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return False
    wrapped = torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value)
    return not wrapped and value.layout is torch.strided and not value.is_meta


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """The memory that a tensor shows, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
