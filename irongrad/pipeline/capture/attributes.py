"""Which attributes of a model and its objects a call only sets, without a read of what an earlier call left there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


class Attributes:
    """The first access to each attribute of modules and other objects, within one call."""

    def __init__(self) -> None:
        self._is_set_first: dict[tuple[int, str], bool] = {}
        self._before: dict[int, dict[str, object]] = {}

    def start(self, owners: Iterable[object]) -> None:
        """Begin a call that may change attributes of `owners`."""
        self._before = {id(owner): dict(vars(owner)) for owner in owners}
        self._is_set_first.clear()

    def is_only_set(self, owner: object, name: str) -> bool:
        """Whether the call sets an attribute before it reads it, if it reads it at all."""
        return self._is_set_first.get((id(owner), name), False)

    def read(self) -> list[tuple[int, str]]:
        """The attributes that the call reads and has not set before: the ids of their owners, and their names."""
        return [attribute for attribute, is_set in self._is_set_first.items() if not is_set]

    def put_back(self, owner: object, name: str) -> None:
        """Undo what the call did to an attribute."""
        before = self._before[id(owner)]
        if name in before:
            vars(owner)[name] = before[name]
        else:
            vars(owner).pop(name, None)

    @contextmanager
    def watched(self, owners: Iterable[object]) -> Iterator[None]:
        """While open, note accesses to attributes of all `owners`."""
        classes = {type(owner) for owner in owners}
        with ExitStack() as stack:
            for cls in classes:
                for name, wrapped in (("__getattribute__", self._reading), ("__setattr__", self._setting)):
                    stack.enter_context(mock.patch.object(cls, name, wrapped(inspect.getattr_static(cls, name))))
            yield

    def _reading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(owner: object, name: str) -> Any:
            self._is_set_first.setdefault((id(owner), name), False)
            return plain(owner, name)

        return read

    def _setting(self, plain: Callable[..., None]) -> Callable[..., None]:
        def write(owner: object, name: str, value: object) -> None:
            self._is_set_first.setdefault((id(owner), name), True)
            plain(owner, name, value)

        return write
