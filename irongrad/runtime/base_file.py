"""The base file: frozen parameters and buffers that several artifacts share, and processes map into one memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import iree.runtime as ireert

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.manifest_file import file_spec
from irongrad.runtime.parameter_files import parameter_index, read_parameters
from irongrad.runtime.safetensors_file import numpy_dtype


def base_of(manifest: Manifest, directory: Path, given: Path | None = None) -> Path | None:
    """Return the base file of the artifact in `directory`; None if it has none.

    Args:
        manifest: the artifact's manifest.
        directory: the artifact's directory.
        given: where the file is, if not where it was when the artifact was compiled.

    Raises:
        ArtifactError: the file is missing, or another one; or the artifact has no base and one is given.
    """
    spec = manifest.base_file
    if spec is None:
        if given is not None:
            raise ArtifactError(f"{directory} holds all of its state, so it takes no base; {given} is given")
        return None
    path = given or directory / spec.path
    try:
        found = file_spec(path)
    except OSError as error:
        raise ArtifactError(
            f"the base {path} of {directory} cannot be read: {error.strerror}. Put it there, or give its place: "
            "--base FILE, or load(..., base=FILE)"
        ) from None
    if (found.sha256, found.size) != (spec.sha256, spec.size):
        raise ArtifactError(
            f"{path} is not the base of {directory}: its sha256 is {found.sha256[:12]}…, and the manifest says "
            f"{spec.sha256[:12]}…"
        )
    return path


def read_base(manifest: Manifest, path: Path | None) -> dict[str, Array]:
    """Return the tensors of the base by name, as read-only views of the mapped file."""
    spec = manifest.base_file
    if path is None or spec is None:
        return {}
    raw = read_parameters(path, spec.format)
    return {s.name: raw[spec.tensors[s.name]].view(numpy_dtype(s.dtype)).reshape(s.shape) for s in manifest.in_base}


def base_index(manifest: Manifest, path: Path | None, *, mapped: bool) -> ireert.ParameterIndex:
    """Return IREE's index of the base file; an empty one without a base.

    Args:
        manifest: the artifact's manifest.
        path: the base file.
        mapped: whether the device can use memory of the host.
    """
    spec = manifest.base_file
    if path is None or spec is None:
        return ireert.ParameterIndex()
    return parameter_index(path, spec.format, mapped=mapped)


def refuse_other_values(arrays: Mapping[str, Array], base: Mapping[str, Array], source: str) -> None:
    """Refuse a state whose tensors of the base have other values.

    Raises:
        ArtifactError: names the first.
    """
    for name, array in base.items():
        given = arrays.get(name)
        if given is not None and given.tobytes() != array.tobytes():
            raise ArtifactError(
                f"{source} has other values for {name}, which lies in the base that artifacts share. Leave the frozen "
                "tensors out, or compile without a base"
            )
