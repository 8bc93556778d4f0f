"""`irongrad export --to onnx` and `--to inference`: what they predict is what the artifact predicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.cli.export import command
from irongrad.frontends.export_inference import export_inference
from irongrad.frontends.export_onnx import export_onnx
from irongrad.frontends.trained_step import TrainedStep
from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError, ToolchainError, UserError, VerificationError
from irongrad.runtime.manifest import OF_UPDATES
from irongrad.runtime.manifest_file import read_manifest

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx-export installs onnxruntime")


class Net(nn.Module):
    """An embedding that is tied to the output, BatchNorm, and dropout; two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.features(ids)
        return {"logits": self.head(self.drop(hidden)), "hidden": hidden}

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.embedding(ids)))


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels)


def make_step(make: Callable[[], Net] = Net) -> ig.TrainStep:
    model = make()
    inputs = {"ids": torch.arange(6), "labels": torch.arange(6)}
    dynamic = {"ids": {0: "B"}, "labels": {0: "B"}}
    entries = {"features": (model.features, {"ids": torch.arange(4)})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return ig.TrainStep(model, loss, optimizer, inputs, dynamic=dynamic, buckets={"B": [4, 8]}, entries=entries)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ig.compile(make_step(), tmp_path_factory.mktemp("net") / "net").directory


@pytest.fixture(scope="module")
def checkpoint(artifact: Path) -> Path:
    with load(artifact) as session:
        for shift in range(5):
            session.train_step(ids=np.arange(6), labels=(np.arange(6) + shift) % 12)
        session.save(artifact.parent / "net.safetensors")
    return artifact.parent / "net.safetensors"


def run_onnx(path: Path, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([node.name for node in session.get_outputs()], session.run(None, inputs), strict=True))


def same(ours: Any, theirs: Any, atol: float = 2e-6) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=atol)


def test_onnx_runtime_predicts_what_the_artifact_predicts(artifact: Path, checkpoint: Path, tmp_path: Path) -> None:
    files, compared = export_onnx(TrainedStep(make_step(), "net.py", artifact, checkpoint), tmp_path / "net.onnx")
    assert (files, compared) == ([tmp_path / "net.onnx"], True)
    assert list(tmp_path.iterdir()) == files
    with load(artifact, checkpoint=checkpoint) as trained, load(artifact) as untrained:
        for rows in (6, 3, 8):  # the batch varies in the file as it does in the step
            ids = np.arange(rows)
            found = run_onnx(files[0], ids=ids)
            same(found, trained.predict(ids=ids))
            assert np.abs(found["logits"] - untrained.predict(ids=ids)["logits"]).max() > 0.1


def test_an_artifact_that_predicts_alone(artifact: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert export_inference(TrainedStep(make_step(), "net.py", artifact, checkpoint), tmp_path / "net")
    manifest = read_manifest(tmp_path / "net")
    assert {e.name for e in manifest.entry_points} == {"predict", "features", "export_state", "import_state"}
    assert not [s.name for s in manifest.state if s.role in OF_UPDATES]
    assert [s.name for s in read_manifest(artifact).state if s.role in OF_UPDATES]
    before = read_manifest(artifact)
    for name in ("state.irpa", "step.llvm-cpu.vmfb"):
        assert (tmp_path / "net" / name).stat().st_size < (artifact / name).stat().st_size
    assert {t.certificate is not None for t in manifest.targets} == {True}
    assert [t.asked for t in manifest.targets] == [t.asked for t in before.targets]
    with load(artifact, checkpoint=checkpoint) as trained, load(tmp_path / "net") as alone:
        for rows in (6, 3):
            same(alone.predict(ids=np.arange(rows)), trained.predict(ids=np.arange(rows)))
        same({"": alone.call("features", ids=np.arange(4))}, {"": trained.call("features", ids=np.arange(4))})


class Changed(Net):
    """Code that was changed after the artifact was compiled, in a way that no tensor tells."""

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.embedding(ids)))


class Wider(Net):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 13)


@pytest.mark.parametrize("to", [export_onnx, export_inference])
def test_other_code_is_refused_and_nothing_is_written(
    to: Callable[..., Any], artifact: Path, checkpoint: Path, tmp_path: Path
) -> None:
    for make, error, message in (
        (Changed, VerificationError, "the model of net.py predicts something else than .*: predict/0/"),
        (Wider, ArtifactError, "head.weight"),
    ):
        with pytest.raises(error, match=message):
            to(TrainedStep(make_step(make), "net.py", artifact, checkpoint), tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_what_onnx_cannot_express_is_refused(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the exporter's first line\nand a page of others")

    monkeypatch.setattr("torch.onnx.export", refused)
    with pytest.raises(ToolchainError) as caught:
        export_onnx(TrainedStep(make_step(), "net.py", artifact), tmp_path / "net.onnx")
    assert str(caught.value) == "torch.onnx.export refuses the model: the exporter's first line"
    assert not list(tmp_path.iterdir())


def with_lora() -> ig.TrainStep:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return ig.TrainStep(model, lambda out: out.square().mean(), optimizer, {"x": torch.ones(3, 4)})


def test_a_merged_adapter_is_no_part_of_what_is_exported(tmp_path: Path) -> None:
    folder = ig.compile(with_lora(), tmp_path / "net").directory
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    with load(folder) as session:
        for _ in range(3):
            session.train_step(x=np.ones((3, 4), np.float32))
        session.save(tmp_path / "net.safetensors")
        expected = session.predict(x=x)
    assert export_inference(
        TrainedStep(with_lora(), "net.py", folder, tmp_path / "net.safetensors", merge=True), tmp_path / "merged"
    )
    assert not [s.name for s in read_manifest(tmp_path / "merged").state if "lora" in s.name]
    with load(tmp_path / "merged") as session:
        np.testing.assert_allclose(session.predict(x=x), expected, atol=1e-6)
    (file,), _ = export_onnx(
        TrainedStep(with_lora(), "net.py", folder, tmp_path / "net.safetensors", merge=True), tmp_path / "net.onnx"
    )
    assert b"lora" not in file.read_bytes()
    (found,) = run_onnx(file, x=x).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


FILE = """
import sys
sys.path.insert(0, {root!r})
from tests.frontends.test_export_of_code import make_step
"""


def test_the_command(artifact: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE.format(root=os.getcwd()))
    options = ["--checkpoint", checkpoint, "--model", f"{tmp_path}/net.py:make_step", "-o", tmp_path / "net.onnx"]

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False).stdout

    report = json.loads(run(artifact, "--to", "onnx", *options, "--json"))
    size = (tmp_path / "net.onnx").stat().st_size
    assert report == {"files": [{"path": str(tmp_path / "net.onnx"), "bytes": size}], "compared": True}
    for arguments, message in {
        ("--to", "onnx"): "--to onnx is made from the model's code, and an artifact has none: give --model",
        ("--to", "torch", "--model", "net.py:make_step"): "--model is for --to onnx and --to inference",
        ("--to", "torch", "--merge"): "--merge is for --to onnx and --to inference",
        ("--to", "onnx", "--model", "a.py:f", "--target", "cuda"): "--target is for --to inference",
        ("--to", "onnx", *options, "--merge"): "the model has none: leave it out",
    }.items():
        with pytest.raises(UserError, match=message):
            run(artifact, "-o", tmp_path / "other", *arguments)


def test_an_artifact_that_cannot_predict_is_not_compared(tmp_path: Path) -> None:
    step = replace(make_step(), entries={})
    folder = ig.compile(step, tmp_path / "net", entry_points=["train_step"]).directory
    _, compared = export_onnx(TrainedStep(replace(make_step(), entries={}), "net.py", folder), tmp_path / "net.onnx")
    assert not compared
