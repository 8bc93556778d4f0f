"""What was measured, in the cache, by the computation, the machine and the versions of the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

from irongrad.analysis.machine import threads
from irongrad.cache import Store
from irongrad.cache.machine import host, sha256, sources
from irongrad.runtime.scratch import scratch_directory

TIMING = "timing"

_TIMES = "times.msgpack"

T = TypeVar("T")


def key_of(what: str, names: Sequence[str], *others: object) -> str:
    """The key of a measurement, from everything that the times depend on, including IronGrad's own sources."""
    versions = [version(p) for p in ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")]
    return sha256(what, tuple(names), others, versions, host(), threads(), sources())


def known(store: Store | None, key: str, kind: type[T]) -> T | None:
    """The record of an earlier measurement; None if there is none."""
    with scratch_directory() as folder:
        if store is not None and store.get(TIMING, key, folder):
            with suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode((Path(folder) / _TIMES).read_bytes(), type=kind)
    return None


def keep(store: Store | None, key: str, record: object) -> None:
    """Keep the record of a measurement."""
    if store is not None:
        store.put(TIMING, key, {_TIMES: msgspec.msgpack.encode(record)})
