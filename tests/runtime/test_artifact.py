"""Damaged, foreign and misplaced artifacts and checkpoints are refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from irongrad.runtime import Session
from irongrad.runtime.cpu import check_cpu
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest_file import read_manifest


@pytest.fixture
def copy(mlp_artifact, tmp_path):
    return shutil.copytree(mlp_artifact, tmp_path / "copy")


@pytest.mark.parametrize("name", ["step.llvm-cpu.vmfb", "state.irpa"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_files_are_caught_by_their_hashes(copy, name, damage):
    path = copy / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    with pytest.raises(ArtifactError, match=f"{name} is (damaged|missing)"):
        Session(copy)


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="not an IronGrad artifact"):
        Session(tmp_path)
    with pytest.raises(ArtifactError, match="not an IronGrad artifact"):
        Session(tmp_path / "nowhere")
    (tmp_path / "step.vmfb").write_bytes(b"")
    with pytest.raises(ArtifactError, match="it is a file, and an artifact is the directory"):
        Session(tmp_path / "step.vmfb")


def edit_manifest(directory, change):
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_damaged_manifest_is_refused(copy):
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="manifest.json is damaged"):
        Session(copy)


def test_a_manifest_of_another_format_is_refused(copy):
    edit_manifest(copy, lambda m: m.update(format_version=99))
    with pytest.raises(ArtifactError, match="format version 99; this IronGrad reads version 3"):
        Session(copy)


def test_a_manifest_with_a_wrong_field_is_refused(copy):
    edit_manifest(copy, lambda m: m["state"][0].update(shape="wide"))
    with pytest.raises(ArtifactError, match=r"Expected `array`, got `str` - at `\$.state\[0\].shape`"):
        Session(copy)


def test_a_binary_for_another_cpu_is_refused(mlp_artifact):
    target = read_manifest(mlp_artifact).targets[0]
    with pytest.raises(ArtifactError, match="lacks: amx-fantasy"):
        check_cpu(replace(target, features=(*target.features, "amx-fantasy")), mlp_artifact)
    with pytest.raises(ArtifactError, match="compiled for riscv64"):
        check_cpu(replace(target, architecture="riscv64"), mlp_artifact)
    check_cpu(target, mlp_artifact)


def test_an_unknown_target_is_refused(mlp_artifact):
    with pytest.raises(ArtifactError, match="no target 'cuda'; it has llvm-cpu"):
        Session(mlp_artifact, target="cuda")


def checkpoint_with(session, path, change):
    session.save(path)
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path)


WRONG_CHECKPOINTS = {
    "missing tensor": (lambda a: a.pop("0.weight"), "0.weight is missing"),
    "unknown tensor": (lambda a: a.update(extra=np.zeros(1)), "extra is unknown"),
    "shape": (lambda a: a.update({"0.bias": np.zeros(3, np.float32)}), r"0.bias is float32\[3\], the step has"),
    "dtype": (lambda a: a.update({"0.bias": a["0.bias"].astype(np.float64)}), "0.bias is float64"),
}


@pytest.mark.parametrize("case", WRONG_CHECKPOINTS)
def test_a_checkpoint_of_another_model_is_refused(mlp_artifact, tmp_path, case):
    change, message = WRONG_CHECKPOINTS[case]
    session = Session(mlp_artifact)
    before = session.state()
    path = tmp_path / "wrong.safetensors"
    checkpoint_with(session, path, change)
    with pytest.raises(ArtifactError, match=message):
        session.restore(path)
    with pytest.raises(ArtifactError, match=message):
        Session(mlp_artifact, checkpoint=path)
    after = session.state()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_tied_values_must_agree(mlp_artifact, tmp_path):
    session = Session(mlp_artifact)
    path = tmp_path / "untied.safetensors"
    checkpoint_with(session, path, lambda a: a.update({"optimizer/step/0.bias": np.array(7, np.float32)}))
    with pytest.raises(ArtifactError, match="one tensor in the compiled step, but their values differ"):
        session.restore(path)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all"])
def test_a_damaged_checkpoint_is_refused(mlp_artifact, tmp_path, content):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        Session(mlp_artifact).restore(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        Session(mlp_artifact).restore(tmp_path / "nowhere.safetensors")


def test_a_failed_save_leaves_the_old_file(session, tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    session.save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        session.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
