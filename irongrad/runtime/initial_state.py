"""The state that an artifact was compiled with."""

from __future__ import annotations

from pathlib import Path

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import from_bytes
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import INITIAL_STATE, Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.parameter_archive import read_archive


def initial_state(directory: Path) -> dict[str, Array]:
    """Return the state that the artifact in `directory` was compiled with.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    return state_of(read_manifest(directory), directory)


def state_of(manifest: Manifest, directory: Path) -> dict[str, Array]:
    """Return the initial state of the artifact in `directory`, whose manifest is read already.

    Raises:
        ArtifactError: its file is missing or damaged.
    """
    check_files(manifest, directory, (INITIAL_STATE,))
    return from_bytes(read_archive(directory / INITIAL_STATE), manifest)
