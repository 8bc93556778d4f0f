"""`irongrad rebuild`: targets compiled again from the module in the artifact, without the model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from irongrad.analysis.file import read_analysis
from irongrad.cli.rebuild import command
from irongrad.pipeline.iree import compile_cached
from irongrad.pipeline.rebuild import rebuild
from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError, ToolchainError, UserError, VerificationError
from irongrad.runtime.manifest import GOLDEN, PORTABLE_MODULE
from irongrad.runtime.manifest_file import file_spec, read_manifest, write_manifest


@pytest.fixture
def copy(mlp_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mlp_artifact, tmp_path / "copy"))


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def run(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(command, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.output)


def replace_file(directory: Path, name: str, content: bytes) -> None:
    """Replace a file of the artifact, and its hash in the manifest."""
    (directory / name).write_bytes(content)
    manifest = read_manifest(directory)
    write_manifest(replace(manifest, files=manifest.files | {name: file_spec(directory / name)}), directory)


def test_the_same_iree_makes_the_same_artifact_without_the_compiled_file(copy, mlp_artifact):
    (copy / "step.llvm-cpu.vmfb").unlink()
    (row,) = run(copy)["targets"]
    assert row["same"]
    assert row["compiler"] == row["compiler_before"]
    assert row["worst"] <= 1
    assert files(copy) == files(mlp_artifact)


def test_another_target_is_added_beside_the_first_and_trains_the_same(copy, mlp_artifact, batches):
    (copy / "mine.txt").write_text("kept")
    (row,) = run(copy, "--target", "llvm-cpu:cpu=x86-64-v3")["targets"]
    assert not row["same"]
    _, target = read_manifest(copy).targets
    assert "--iree-llvmcpu-target-cpu=x86-64-v3" in target.flags
    assert target.asked == "llvm-cpu:cpu=x86-64-v3"
    assert target.certificate.worst <= 1
    unchanged = {"state.irpa", "golden.safetensors", "step.mlirbc"}
    assert all(files(copy)[n] == files(mlp_artifact)[n] for n in unchanged)
    assert (copy / "mine.txt").read_text() == "kept"
    old, new = Session(mlp_artifact), Session(copy, target=target.name)
    for batch in batches[:3]:
        np.testing.assert_allclose(new.train_step(**batch), old.train_step(**batch), rtol=1e-4)


def test_wrong_numbers_leave_the_artifact_as_it_was(copy, monkeypatch):
    golden = safetensors.numpy.load_file(copy / GOLDEN)
    golden["expected/loss/1/"] = np.asarray(golden["expected/loss/1/"] + 1e-3)
    with safetensors.safe_open(copy / GOLDEN, "numpy") as file:
        metadata = file.metadata()
    replace_file(copy, GOLDEN, safetensors.numpy.save(golden, metadata=metadata))
    manifest = read_manifest(copy)
    monkeypatch.setattr(compile_cached, "compile_module", _compiled_before(copy))
    before = files(copy)
    with pytest.raises(VerificationError, match=r"llvm-cpu, compiled again, disagrees .* loss/1/"):
        rebuild(copy)
    assert files(copy) == before
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]
    assert read_manifest(copy) == manifest


def _compiled_before(directory: Path):
    """A stand-in for iree-compile that returns the compiled file of the artifact."""

    def compile_module(module, target, *arguments):
        manifest = read_manifest(directory)
        (spec,) = manifest.targets
        vmfb = (directory / spec.file).read_bytes()
        return SimpleNamespace(
            target=target,
            device=spec.device,
            flags=spec.flags,
            vmfb=vmfb,
            architecture=spec.architecture,
            features=spec.features,
            statistics=SimpleNamespace(transients=spec.transients),
            record=read_analysis(directory, manifest).targets[spec.name],
        )

    return compile_module


def test_a_damaged_module_is_refused(copy):
    (copy / PORTABLE_MODULE).write_bytes(b"")
    with pytest.raises(ArtifactError, match="step.mlirbc is damaged"):
        rebuild(copy)


def test_a_module_that_this_iree_cannot_read_is_a_toolchain_error(copy):
    replace_file(copy, PORTABLE_MODULE, b"ML\xefR no module of any version")
    with pytest.raises(ToolchainError, match="this IREE cannot read"):
        rebuild(copy)


def test_an_artifact_without_its_targets_requires_the_option(copy):
    manifest = read_manifest(copy)
    old = replace(manifest, targets=tuple(replace(t, asked="") for t in manifest.targets))
    write_manifest(old, copy)
    with pytest.raises(UserError, match="give --target"):
        rebuild(copy)
