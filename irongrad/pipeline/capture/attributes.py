"""Which attributes of a model a call only sets, without a read of what an earlier call left there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn


class Attributes:
    """The first access to each attribute of a module's submodules, within one call."""

    def __init__(self) -> None:
        self._is_set_first: dict[tuple[int, str], bool] = {}
        self._before: dict[int, dict[str, object]] = {}

    def start(self, module: nn.Module) -> None:
        """Begin a call of `module`."""
        self._before = {id(m): dict(vars(m)) for m in module.modules()}
        self._is_set_first.clear()

    def is_only_set(self, module: nn.Module, name: str) -> bool:
        """Whether the call sets an attribute before it reads it, if it reads it at all."""
        return self._is_set_first.get((id(module), name), False)

    def read(self) -> list[tuple[int, str]]:
        """The attributes that the call reads and has not set before: the ids of their modules, and their names."""
        return [attribute for attribute, is_set in self._is_set_first.items() if not is_set]

    def put_back(self, module: nn.Module, name: str) -> None:
        """Undo what the call did to an attribute."""
        before = self._before[id(module)]
        if name in before:
            vars(module)[name] = before[name]
        else:
            vars(module).pop(name, None)

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """While open, note accesses to attributes of all submodules that are none of PyTorch's layers."""
        torch_itself = f"{torch.__name__}."
        classes = {type(m) for m in module.modules() if not type(m).__module__.startswith(torch_itself)}
        with ExitStack() as stack:
            for cls in classes:
                for name, wrapped in (("__getattribute__", self._reading), ("__setattr__", self._setting)):
                    stack.enter_context(mock.patch.object(cls, name, wrapped(inspect.getattr_static(cls, name))))
            yield

    def _reading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(module: nn.Module, name: str) -> Any:
            self._is_set_first.setdefault((id(module), name), False)
            return plain(module, name)

        return read

    def _setting(self, plain: Callable[..., None]) -> Callable[..., None]:
        def write(module: nn.Module, name: str, value: object) -> None:
            self._is_set_first.setdefault((id(module), name), True)
            plain(module, name, value)

        return write
