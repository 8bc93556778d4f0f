"""What the cache keeps of a build: the artifact whole, and each .vmfb by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from irongrad.cache.artifacts import ARTIFACT, RECORD, restored
from irongrad.cache.store import Store
from irongrad.passes import PassRecord
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.iree.report.statistics import Statistics
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.step_key import step_key
from irongrad.runtime.manifest import MANIFEST, encoded
from irongrad.runtime.verification import Report

if TYPE_CHECKING:
    from irongrad.pipeline.options import Options


@dataclass(frozen=True)
class BuildRecord:
    """What a build says of itself, beside its artifact.

    Attributes:
        passes: what each pass did to each function.
        statistics: what the compiler says of the program, by target.
        reports: the verification of each target that could run, by target.
    """

    passes: tuple[PassRecord, ...]
    statistics: dict[str, Statistics]
    reports: dict[str, Report]


@dataclass(frozen=True)
class CacheEntry:
    """Where a build is kept.

    Attributes:
        store: the cache.
        key: the build's key.
    """

    store: Store
    key: str

    def load(self, output: Path) -> tuple[Artifact, BuildRecord] | None:
        """Write the artifact that is kept to `output`; None where there is no whole one."""
        found = restored(self.store, self.key, output, _decoded)
        if found is None:
            return None
        manifest, record = found
        return Artifact(output, manifest, record.reports), record

    def keep(self, artifact: Artifact, record: BuildRecord) -> bool:
        """Keep a build, if every target could be verified: elsewhere, or later, one more may be."""
        if any(t.certificate is None for t in artifact.manifest.targets):
            return False
        files = {n: artifact.directory / n for n in artifact.manifest.files}
        about = {MANIFEST: encoded(artifact.manifest), RECORD: msgspec.msgpack.encode(record)}
        self.store.put(ARTIFACT, self.key, {**files, **about})
        return True


def _decoded(record: bytes) -> BuildRecord:
    return msgspec.msgpack.decode(record, type=BuildRecord)


def cache_entry(captured: CapturedStep, options: Options, golden_steps: int) -> CacheEntry | None:
    """Where the build of a captured step is kept; None where it has to run."""
    if options.cache is None or options.dump_dir is not None or options.stop_after is not None:
        return None
    key = step_key(captured, options, golden_steps)
    return CacheEntry(options.cache, key) if key is not None else None
