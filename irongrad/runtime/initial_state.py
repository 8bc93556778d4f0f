"""The state that an artifact was compiled with."""

from __future__ import annotations

from pathlib import Path

from irongrad.runtime.arrays import Array
from irongrad.runtime.base_file import base_of, read_base
from irongrad.runtime.checkpoint import from_bytes
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import INITIAL_STATE, Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.parameter_files import read_parameters


def initial_state(directory: Path, base: Path | None = None) -> dict[str, Array]:
    """Return the state that the artifact in `directory` was compiled with.

    Args:
        directory: the artifact's directory.
        base: its base file, if not where it was when the artifact was compiled.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    return state_of(read_manifest(directory), directory, base)


def state_of(manifest: Manifest, directory: Path, base: Path | None = None) -> dict[str, Array]:
    """Return the initial state of the artifact in `directory`, whose manifest is read already.

    Raises:
        ArtifactError: its file is missing or damaged.
    """
    check_files(manifest, directory, (INITIAL_STATE,))
    shared = base_of(manifest, directory, base)
    return from_bytes(read_parameters(directory / INITIAL_STATE) | read_base(manifest, shared), manifest)
