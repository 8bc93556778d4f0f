"""Measured times in the cache, by what was measured, the machine and the versions of the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

from irongrad.cache import Store
from irongrad.cache.machine import host, sha256, sources
from irongrad.runtime.scratch import scratch_directory

TIMING = "timing"

_TIMES = "times.msgpack"


def key_of(what: str, names: Sequence[str], *others: object) -> str:
    """The key of a measurement, from everything that the times depend on, including IronGrad's own sources."""
    versions = [version(p) for p in ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")]
    return sha256(what, tuple(names), others, versions, host(), sources())


def known(store: Store | None, key: str) -> dict[str, float] | None:
    """The times of an earlier measurement in seconds, by name; None if there is none."""
    with scratch_directory() as folder:
        if store is not None and store.get(TIMING, key, folder):
            with suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode((Path(folder) / _TIMES).read_bytes(), type=dict[str, float])
    return None


def keep(store: Store | None, key: str, times: Mapping[str, float]) -> None:
    """Keep the times of a measurement."""
    if store is not None:
        store.put(TIMING, key, {_TIMES: msgspec.msgpack.encode(dict(times))})
