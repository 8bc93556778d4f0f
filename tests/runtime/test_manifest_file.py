"""The manifest's own digest, and the paths in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import Plan
from irongrad.runtime.manifest import MANIFEST
from irongrad.runtime.manifest_file import encoded, read_manifest, write_manifest


@pytest.fixture
def copy(mlp_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mlp_artifact, tmp_path / "copy"))


def test_every_flipped_bit_of_a_manifest_is_found(copy):
    path = copy / MANIFEST
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(good), 2000):
        data = bytearray(good)
        data[place // 8] ^= 1 << (place % 8)
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            read_manifest(copy)


@pytest.mark.parametrize("field", ["hypers", "state", "entry_points", "gradients"])
def test_a_changed_order_is_found(copy, field):
    path = copy / MANIFEST
    data = json.loads(path.read_text())
    data[field].reverse()
    path.write_text(json.dumps(data, indent=2) + "\n")
    with pytest.raises(ArtifactError, match="differs from its digest"):
        Session(copy)


def test_the_digest_is_the_identity(copy):
    manifest = read_manifest(copy)
    assert encoded(manifest) == (copy / MANIFEST).read_bytes()
    write_manifest(replace(manifest, versions={**manifest.versions, "note": "changed"}), copy)
    assert read_manifest(copy).digest != manifest.digest


@pytest.mark.parametrize("file", ["../outside", "/etc/hostname", "a/b", "..", "", "a\\b", "c:d", "a\0b"])
@pytest.mark.parametrize("where", ["targets", "files"])
def test_files_outside_of_the_artifact_are_refused(copy, file, where):
    manifest = read_manifest(copy)
    if where == "targets":
        changed = replace(manifest, targets=(replace(manifest.targets[0], file=file),))
    else:
        changed = replace(manifest, files={**manifest.files, file: next(iter(manifest.files.values()))})
    write_manifest(changed, copy)
    with pytest.raises(ArtifactError, match="is not in the artifact's directory"):
        Session(copy)


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"\xff", b"[" * 100_000, b'{"format_version": 3}', b"null"])
def test_what_is_no_manifest_is_refused(copy, data):
    (copy / MANIFEST).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"is damaged|has format version"):
        read_manifest(copy)


def test_a_truncated_module_does_not_end_the_process(copy, batches):
    """A mapped file that is truncated ends the process with SIGBUS."""
    session = Session(copy)
    for path in copy.iterdir():
        path.write_bytes(b"")
    session.train_step(**batches[0])
    session.state()


@pytest.mark.parametrize("name", ["../outside.npy", "/tmp/outside.npy", "a/../../outside.npy"])
def test_golden_files_stay_in_their_directory(mlp_artifact, tmp_path, name):
    plan = Plan((), {name: np.zeros(1)}, {})
    with pytest.raises(ArtifactError, match="which is outside of"):
        write_files(plan, read_manifest(mlp_artifact), tmp_path / "golden")
    assert not (tmp_path / "outside.npy").exists()
