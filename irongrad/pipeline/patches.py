"""Patches of PyTorch's own classes and functions, which all threads see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_LOCK = RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Wait for all others that are in here: who patches PyTorch, and who runs what that would change.

    `make_fx` patches the calls of every `nn.Module` while it traces, and eager runs make loops of `scan` and the like.
    """
    with _LOCK:
        yield
