"""Fingerprints of Python values, which change when a value changes: also one that is hidden in an iterator or array."""

from __future__ import annotations

import array
import copyreg
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from types import GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from irongrad.diagnostics.source_lines import is_user_class

NUMBERS = (bool, int, float, str, type(None))
_DEPTH = 8
_WIDTH = 100  # of the entries after so many, only the numbers count
_LARGEST = 2**22  # the most bytes of an array

# Iterators of Python's own, such as `itertools.count()`, tell by `__reduce__` where they are.
_OF_ITERATORS = ("itertools", "builtins")


def fingerprint(value: object, depth: int = 0) -> object:
    """What tells whether a value has changed."""
    if isinstance(value, NUMBERS):
        return (type(value).__name__, repr(value))
    if isinstance(value, bytes):
        return hash(value)
    if depth > _DEPTH:
        return id(value)
    if isinstance(value, dict):
        pairs = [(k, v) for k, v in dict.items(value) if not _is_of_a_trace(k)]
        named = [(repr(k)[:_WIDTH], fingerprint(v, depth + 1)) for k, v in pairs[:_WIDTH]]
        return (len(pairs), named, _of_numbers([v for _, v in pairs[_WIDTH:]]))
    if isinstance(value, (list, tuple, set, deque)):
        items = [*iter(value)]  # not by len(), which a subclass may forbid
        return (len(items), [fingerprint(v, depth + 1) for v in items[:_WIDTH]], _of_numbers(items[_WIDTH:]))
    if not isinstance(value, nn.Module) and is_user_class(type(value)):
        return (id(value), fingerprint(getattr(value, "__dict__", None), depth + 1), _slots(value, depth))
    if has_hidden_state(value):
        return (id(value), fingerprint(_hidden_state(value), depth + 1))
    return id(value)


def has_hidden_state(value: object) -> bool:
    """Whether a value is no container or object of the user's, and yet may change without becoming another object."""
    kinds = (np.ndarray, array.array, bytearray, SimpleNamespace, threading.local, partial, GeneratorType, ContextVar)
    return isinstance(value, kinds) or (isinstance(value, Iterator) and type(value).__module__ in _OF_ITERATORS)


def _hidden_state(value: Any) -> object:
    """What changes when such a value changes."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _LARGEST and not value.dtype.hasobject else None
    if isinstance(value, (array.array, bytearray)):
        return bytes(value)
    if isinstance(value, partial):
        return (value.args, value.keywords)
    if isinstance(value, (SimpleNamespace, threading.local)):
        return vars(value)
    if isinstance(value, GeneratorType):
        return (value.gi_frame.f_lasti, dict(value.gi_frame.f_locals)) if value.gi_frame is not None else None
    if isinstance(value, ContextVar):
        return value.get(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.14 will not copy these iterators any more
        try:
            return value.__reduce__()
        except TypeError:
            return None


def _slots(value: object, depth: int) -> object:
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return [(name, fingerprint(getattr(value, name, None), depth + 1)) for name in names]


def _of_numbers(items: list[Any]) -> int:
    return hash(tuple(item for item in items if isinstance(item, NUMBERS)))


def _is_of_a_trace(key: object) -> bool:
    """Whether an entry of a cache belongs to the class of a trace's tensors, which no eager call looks up."""
    return isinstance(key, type) and issubclass(key, FakeTensor)
