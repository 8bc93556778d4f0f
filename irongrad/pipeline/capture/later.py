"""Clocks that show a later time, to find a step that reads the time."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from irongrad.diagnostics.source_lines import is_user_file
from irongrad.runtime.loaded_modules import module_globals

_SECONDS = 3_468_345.678  # another month, day, weekday, hour, minute and second
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_FORMATS = ("localtime", "gmtime", "ctime", "strftime", "asctime")  # of the present time, if none is given


@contextmanager
def later(namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """While open, the clocks of `time`, and those of `datetime` in `namespaces`, show a later time."""
    classes = {cls: _later_class(cls) for cls in (datetime.datetime, datetime.date)}
    with ExitStack() as stack:
        for name in _CLOCKS:
            for clock, shift in ((name, _SECONDS), (f"{name}_ns", int(_SECONDS * 1e9))):
                stack.enter_context(mock.patch.object(time, clock, partial(_shifted, getattr(time, clock), shift)))
        now = time.localtime
        for name in _FORMATS:
            stack.enter_context(mock.patch.object(time, name, _formatted(name, getattr(time, name), now)))
        for names in namespaces:
            changed = {n: classes[v] for n, v in names.items() if isinstance(v, type) and v in classes}
            stack.enter_context(mock.patch.dict(names, changed))
        yield


def _shifted(clock: Callable[[], float], shift: float) -> float:
    return clock() + shift


def _formatted(name: str, function: Callable[..., Any], now: Callable[[float], time.struct_time]) -> Callable[..., Any]:
    """A function of `time` that takes the later time where it would take the present one."""
    missing = 1 if name == "strftime" else 0

    def formatted(*values: Any) -> Any:
        if len(values) > missing:
            return function(*values)
        seconds = time.time()
        return function(*values, now(seconds) if name in ("strftime", "asctime") else seconds)

    return formatted


class _SameInstances(type):
    """The instances of a later class are those of the class itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _later_class(cls: Any) -> type:
    difference = datetime.timedelta(seconds=_SECONDS)

    def reading(name: str) -> Any:
        return classmethod(lambda _, *values, **named: getattr(cls, name)(*values, **named) + difference)

    clocks = [n for n in ("now", "utcnow", "today") if hasattr(cls, n)]
    return _SameInstances(cls.__name__, (cls,), {name: reading(name) for name in clocks})


def users_namespaces() -> list[dict[str, Any]]:
    """Return the globals of `datetime` and of the user's modules; a module that is not loaded yet stays so."""
    found: list[dict[str, Any]] = [vars(datetime)]
    for _, names in module_globals():
        path = names.get("__file__")
        if names.get("__name__") == "__main__" or (isinstance(path, str) and is_user_file(path)):
            found.append(names)
    return found
