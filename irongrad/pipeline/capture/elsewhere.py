"""Identities as another process would see them, to find a step whose result depends on them.

An id, an address, the hash of a string and a process's number are the same in every call of one process, so two runs
would agree. A compiled step would keep them for ever.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_SHIFT = 16 * 1_299_709 + 1  # odd, and no multiple of small primes: the remainder of any modulus changes

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")


class _Elsewhere(int):
    """A number that another process would see.

    It equals the number that this process sees, for which dictionaries and sets may hold entries already.
    """

    own: int

    def __eq__(self, other: object) -> bool:
        return self.own == (other.own if isinstance(other, _Elsewhere) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.own)


@contextmanager
def elsewhere(namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """While open, numbers of processes, threads and addresses are others.

    So are ids, hashes and addresses in texts (`repr`) in `namespaces`.
    """
    with ExitStack() as stack:
        for owner, name in ((os, "getpid"), (os, "getppid"), (threading, "get_ident"), (threading, "get_native_id")):
            stack.enter_context(mock.patch.object(owner, name, _shifted(getattr(owner, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", _shifted(torch.Tensor.data_ptr)))
        stack.enter_context(mock.patch.object(os, "getloadavg", _later_load, create=True))
        for names in namespaces:
            own = {"id": _shifted(id), "hash": _hash, "repr": _repr}
            stack.enter_context(mock.patch.dict(names, {n: f for n, f in own.items() if n not in names}))
        yield


def _other(number: int) -> int:
    other = _Elsewhere(number + _SHIFT)
    other.own = number
    return other


def _shifted(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *values: _other(function(*values))


def _hash(value: Any) -> int:
    """The hash of a value; another one of a string or an object, whose hash is its own in every process."""
    return _other(hash(value)) if _varies(value) else hash(value)


def _repr(value: object) -> str:
    """The text of a value, with another address where it has one."""
    return _ADDRESS.sub(lambda found: hex(int(found.group(), 16) + _SHIFT), repr(value))


def _varies(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_varies, value))
    of_identity: object = object.__hash__
    return isinstance(value, (str, bytes)) or type(value).__hash__ is of_identity


def _later_load() -> tuple[float, float, float]:
    return 0.8125, 0.6875, 0.5625
