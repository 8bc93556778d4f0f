"""Artifacts in the cache, and how one is restored to a directory; needs neither torch nor IREE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from irongrad.cache.store import Store
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.staging import publish, staged

ARTIFACT = "artifact"
RECORD = "record.msgpack"  # not JSON, which has no infinity

T = TypeVar("T")


def restored(store: Store, key: str, output: Path, read: Callable[[bytes], T]) -> tuple[Manifest, T] | None:
    """Write the artifact under `key` to `output`; return None if the cache has no complete one.

    Args:
        store: the cache.
        key: the artifact's key.
        output: the directory to write; its old contents are replaced.
        read: decodes the record that was kept with the artifact; raises `msgspec.DecodeError` if the record is damaged.

    Returns:
        The artifact's manifest and its decoded record.
    """
    with staged(output) as staging:
        if not store.get(ARTIFACT, key, staging):
            return None
        try:
            record = read((staging / RECORD).read_bytes())
            manifest = read_manifest(staging)
            check_files(manifest, staging, tuple(manifest.files))
        except (OSError, msgspec.DecodeError, ArtifactError):
            return None
        (staging / RECORD).unlink()
        publish(staging, output)
    return manifest, record
