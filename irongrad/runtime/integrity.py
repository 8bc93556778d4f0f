"""Check the files of an artifact against its manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import MANIFEST, FileSpec, Manifest
from irongrad.runtime.manifest_file import file_spec


def check_files(manifest: Manifest, directory: Path, names: tuple[str, ...]) -> None:
    """Compare the files `names` with the manifest's hashes.

    Raises:
        ArtifactError: a file is missing, is not listed, or differs.
    """
    for name in names:
        path = _listed(manifest, directory, name)
        try:
            _compare(path, manifest.files[name], file_spec(path))
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None


def checked_bytes(manifest: Manifest, directory: Path, name: str) -> bytes:
    """Read the file `name`, and compare what was read with the manifest's hash.

    Raises:
        ArtifactError: as `check_files`.
    """
    path = _listed(manifest, directory, name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    _compare(path, manifest.files[name], FileSpec(hashlib.sha256(data).hexdigest(), len(data)))
    return data


def _listed(manifest: Manifest, directory: Path, name: str) -> Path:
    path = directory / name
    if name not in manifest.files:
        raise ArtifactError(
            f"{directory / MANIFEST} does not list {name}: it is damaged. Copy or compile the artifact again"
        )
    if not path.is_file():
        raise ArtifactError(f"{path} is missing from the artifact; copy the whole directory")
    return path


def _compare(path: Path, wanted: FileSpec, found: FileSpec) -> None:
    if found != wanted:
        raise ArtifactError(
            f"{path} is damaged: it has {found.size} bytes and sha256 {found.sha256[:12]}…, the manifest says "
            f"{wanted.size} and {wanted.sha256[:12]}…. Copy or compile it again"
        )
