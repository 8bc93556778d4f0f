"""Check the files of an artifact against its manifest."""

from __future__ import annotations

from pathlib import Path

from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import MANIFEST, Manifest, file_spec


def check_files(manifest: Manifest, directory: Path, names: tuple[str, ...]) -> None:
    """Compare the files `names` with the manifest's hashes.

    Raises:
        ArtifactError: a file is missing, is not listed, or differs.
    """
    for name in names:
        path = directory / name
        if name not in manifest.files:
            raise ArtifactError(
                f"{directory / MANIFEST} does not list {name}: it is damaged. Copy or compile the artifact again"
            )
        if not path.is_file():
            raise ArtifactError(f"{path} is missing from the artifact; copy the whole directory")
        found = file_spec(path)
        if found != manifest.files[name]:
            raise ArtifactError(
                f"{path} is damaged: it has {found.size} bytes and sha256 {found.sha256[:12]}…, the manifest says "
                f"{manifest.files[name].size} and {manifest.files[name].sha256[:12]}…. Copy or compile it again"
            )
