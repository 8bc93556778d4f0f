"""The measured peaks of this machine, kept in the cache."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from irongrad.analysis.machine import Machine, measured_machine, threads
from irongrad.cache import default_store
from irongrad.cache.machine import host, sha256
from irongrad.reports.multiply_adds import multiply_add_rate
from irongrad.reports.placed import targets_of
from irongrad.runtime.manifest import Manifest

_KIND, _FILE = "machine", "machine.json"

# Raise it if peaks are measured in another way, so that older ones are measured again.
_MEASURES = 2


def machine(*, again: bool = False) -> Machine:
    """The peaks of this machine: those in the cache, or measured now, which takes about three seconds.

    Args:
        again: measure, even if the cache has them.
    """
    found = None if again else known_machine()
    if found is not None:
        return found
    measured, store = measured_machine(multiply_add_rate), default_store()
    if store is not None:
        store.put(_KIND, _key(), {_FILE: msgspec.json.encode(measured)})
    return measured


def known_machine() -> Machine | None:
    """The peaks of this machine in the cache; None if it was not measured."""
    store = default_store()
    if store is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        if store.get(_KIND, _key(), Path(folder)):
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode((Path(folder) / _FILE).read_bytes(), type=Machine)
    return None


def is_of_cpu(manifest: Manifest, target: str) -> bool:
    """Whether a target's code is for a CPU, whose peaks `machine` measures."""
    own = targets_of(manifest, target)
    return bool(own) and all(t.architecture for t in own)


def _key() -> str:
    return sha256(host(), threads(), _MEASURES)
