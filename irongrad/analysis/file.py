"""Write and read the record of a compilation, `analysis.json.gz`."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import msgspec

from irongrad.analysis.records import FORMAT_VERSION, Analysis
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.integrity import checked_bytes
from irongrad.runtime.manifest import ANALYSIS, Manifest


def encoded(analysis: Analysis) -> bytes:
    """The bytes of the file, which are equal for equal records."""
    return gzip.compress(msgspec.json.encode(analysis), mtime=0)


def read_analysis(directory: Path, manifest: Manifest) -> Analysis:
    """Read the record of the artifact in `directory`.

    Raises:
        ArtifactError: the record is missing, damaged, or of another version.
    """
    if ANALYSIS not in manifest.files or not (directory / ANALYSIS).exists():
        raise ArtifactError(
            f"{directory} has no {ANALYSIS}, in which the compiler records what a step does. Compile the step again"
        )
    data = checked_bytes(manifest, directory, ANALYSIS)
    try:
        plain = gzip.decompress(data)
        version = msgspec.json.decode(plain)["format_version"]
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{directory / ANALYSIS} has version {version}; this IronGrad reads version {FORMAT_VERSION}. Compile "
                "the step again, or install the IronGrad that made it"
            )
        return msgspec.json.decode(plain, type=Analysis)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ArtifactError(f"{directory / ANALYSIS} is damaged: {error}. Compile the step again") from None
