"""Write and read `manifest.json`.

msgspec encodes the manifest as JSON, and checks the types when it is read. The file carries its own sha256, because a
changed default of a hyperparameter or a changed order of the state would train with other numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import FORMAT_VERSION, MANIFEST, FileSpec, Manifest

# What stands in the place of the digest while it is computed.
_NO_DIGEST = 64 * "0"


def write_manifest(manifest: Manifest, directory: Path) -> Manifest:
    """Write `manifest` into `directory` as indented JSON, atomically; return it with its digest."""
    complete = with_digest(manifest)
    atomic_write(directory / MANIFEST, _as_json(complete))
    return complete


def encoded(manifest: Manifest) -> bytes:
    """Return `manifest` as the bytes of its file, with their digest."""
    return _as_json(with_digest(manifest))


def with_digest(manifest: Manifest) -> Manifest:
    """Return `manifest` with the digest of its file."""
    return replace(manifest, digest=hashlib.sha256(_as_json(replace(manifest, digest=_NO_DIGEST))).hexdigest())


def _as_json(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _check_digest(data: bytes, manifest: Manifest, path: Path) -> None:
    found = manifest.digest.encode()
    start = data.rfind(found)
    blank = data[:start] + _NO_DIGEST.encode() + data[start + len(found) :]
    if start < 0 or hashlib.sha256(blank).hexdigest() != manifest.digest:
        raise ArtifactError(f"{path} is damaged: it differs from its digest. Copy or compile the artifact again")


def _check_names(manifest: Manifest, path: Path) -> None:
    """Refuse names of files that are outside of the artifact's directory."""
    for name in (*manifest.files, *(t.file for t in manifest.targets)):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0:"):
            raise ArtifactError(f"{path} names the file {name!r}, which is not in the artifact's directory")


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of the artifact in `directory`.

    Raises:
        ArtifactError: there is no manifest, or it is damaged or of another format version.
    """
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except NotADirectoryError:
        raise ArtifactError(
            f"{directory} is not an IronGrad artifact: it is a file, and an artifact is the directory that 'irongrad "
            "compile' wrote"
        ) from None
    except FileNotFoundError:
        raise ArtifactError(
            f"{directory} is not an IronGrad artifact: it has no {MANIFEST}. Make one with 'irongrad compile "
            f"FILE:FUNCTION -o {directory}'"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data).get("format_version")
    except (msgspec.DecodeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}. Copy or compile the artifact again") from None
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {version}; this IronGrad reads version {FORMAT_VERSION}. Compile the step "
            "again, or install the IronGrad that made it"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}. Copy or compile the artifact again") from None
    _check_digest(data, manifest, path)
    _check_names(manifest, path)
    return manifest


def file_spec(path: Path) -> FileSpec:
    """Return the hash and size of the file at `path`."""
    with path.open("rb") as file:
        return FileSpec(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)
