"""Signatures: only an artifact that a trusted key signed is loaded, and nothing of it may change afterwards."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import SIGNATURE
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from irongrad.runtime.signatures import new_key, sign


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def signed(mlp_artifact: Path, tmp_path: Path, key: Path) -> Path:
    copy = Path(shutil.copytree(mlp_artifact, tmp_path / "signed"))
    sign(copy, read_manifest(copy), key)
    return copy


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def test_a_signed_artifact_is_loaded(signed, key, tmp_path):
    new_key(tmp_path / "other")
    load(signed, trusted=public(key))
    load(signed, trusted=[public(tmp_path / "other"), str(public(key))])
    load(signed)


def test_a_private_key_is_its_owners(key):
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="exists already"):
        new_key(key)


def test_an_unsigned_artifact_is_refused(mlp_artifact, key):
    with pytest.raises(ArtifactError, match="is not signed"):
        load(mlp_artifact, trusted=public(key))


def test_a_signature_by_another_key_is_refused(signed, tmp_path):
    other = new_key(tmp_path / "other")
    with pytest.raises(ArtifactError, match="is no signature of"):
        load(signed, trusted=other)


def test_a_changed_artifact_is_refused(signed, key):
    manifest = read_manifest(signed)
    hyper, *rest = manifest.hypers
    write_manifest(replace(manifest, hypers=(replace(hyper, default=2 * hyper.default), *rest)), signed)
    load(signed)
    with pytest.raises(ArtifactError, match="is no signature of"):
        load(signed, trusted=public(key))


@pytest.mark.parametrize("content", [b"", b"00", b"no hexadecimal", b"\xff"])
def test_a_damaged_signature_is_refused(signed, key, content):
    (signed / SIGNATURE).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"is no signature of|is damaged"):
        load(signed, trusted=public(key))


def test_files_that_are_no_keys_are_refused(signed, key, tmp_path):
    (tmp_path / "text").write_text("no key")
    with pytest.raises(UserError, match="is no public key in PEM"):
        load(signed, trusted=tmp_path / "text")
    with pytest.raises(UserError, match="cannot be read"):
        load(signed, trusted=tmp_path / "nowhere")
    with pytest.raises(UserError, match="is no public key in PEM"):
        load(signed, trusted=key)
    with pytest.raises(UserError, match="is no private key in PEM"):
        sign(signed, read_manifest(signed), public(key))
