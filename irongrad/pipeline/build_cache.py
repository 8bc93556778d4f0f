"""Builds in the cache: whole artifacts. `iree/compile_cached.py` caches each .vmfb separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from irongrad.cache.artifacts import ARTIFACT, RECORD, restored
from irongrad.cache.machine import sha256
from irongrad.cache.store import Store
from irongrad.passes import PassRecord
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.iree.report.statistics import Statistics
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.step_key import step_key
from irongrad.runtime.manifest import MANIFEST
from irongrad.runtime.manifest_file import encoded
from irongrad.runtime.report import Report

if TYPE_CHECKING:
    from irongrad.pipeline.options import Options


@dataclass(frozen=True)
class BuildRecord:
    """The compiler's report on a build, kept with its artifact.

    Attributes:
        passes: the record of each pass on each function.
        statistics: the compiler's statistics of the program, by target.
        reports: the verification of each target that could run, by target.
    """

    passes: tuple[PassRecord, ...]
    statistics: dict[str, Statistics]
    reports: dict[str, Report]


@dataclass(frozen=True)
class CacheEntry:
    """The place of a build in the cache.

    Attributes:
        store: the cache.
        key: the build's key.
    """

    store: Store
    key: str

    def load(self, output: Path) -> tuple[Artifact, BuildRecord] | None:
        """Write the cached artifact to `output`; return None if the cache has no complete one."""
        found = restored(self.store, self.key, output, _decoded)
        if found is None:
            return None
        manifest, record = found
        return Artifact(output, manifest, record.reports), record

    def keep(self, artifact: Artifact, record: BuildRecord) -> bool:
        """Keep a build if all its targets were verified; return whether it was kept.

        A target that could not run here may be verified on another machine, or later.
        """
        if any(t.certificate is None for t in artifact.manifest.targets):
            return False
        files = {n: artifact.directory / n for n in artifact.manifest.files}
        about = {MANIFEST: encoded(artifact.manifest), RECORD: msgspec.msgpack.encode(record)}
        self.store.put(ARTIFACT, self.key, {**files, **about})
        return True


def _decoded(record: bytes) -> BuildRecord:
    return msgspec.msgpack.decode(record, type=BuildRecord)


def cache_entry(captured: Mapping[str, CapturedStep], options: Options, golden_steps: int) -> CacheEntry | None:
    """The place of the build of captured steps, by name, in the cache; None if the build has to run."""
    if options.cache is None or options.dump_dir is not None or options.stop_after is not None:
        return None
    if options.base is not None:  # the artifact has the path from its directory, and is one of two files to write
        return None
    keys = {name: step_key(made, options, golden_steps) for name, made in captured.items()}
    if any(key is None for key in keys.values()):
        return None
    key = keys.get("") or sha256([*keys.items()])
    return CacheEntry(options.cache, key)
