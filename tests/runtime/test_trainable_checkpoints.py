"""Checkpoints of the trainable state: small, exact to resume from, and refused beside another base."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.safetensors_file import read_arrays


class Adapted(nn.Module):
    """A frozen base with BatchNorm, and a small adapter."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 6))
        self.norm = nn.BatchNorm1d(6)
        self.adapter = nn.Linear(6, 2)
        self.base.requires_grad_(requires_grad=False)
        with torch.no_grad():
            self.base[0].weight.mul_(scale)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> Any:
        return self.adapter(self.norm(self.base(x) + torch.arange(6.0)))


def compiled(directory: Path, scale: float = 1.0) -> Path:
    model = Adapted(scale)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    inputs = {"x": torch.randn(8, 6), "y": torch.randint(0, 2, (8,))}
    ig.compile(ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs), directory)
    return directory


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("adapted") / "net")


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((8, 6)).astype(np.float32), "y": rng.integers(0, 2, 8)}


def test_a_trainable_checkpoint_leaves_the_base_out_and_resumes_exactly(artifact: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    with load(artifact) as session:
        for seed in range(3):
            session.train_step(**batch(seed))
        session.save(whole, trainable=False)
        session.save(part)  # over half of the parameters are frozen
        expected = [session.train_step(**batch(9)), session.train_step(**batch(10))]
    names = read_arrays(part)[0].keys()
    assert not [n for n in names if n.startswith(("base.", "constant/"))]
    assert {"adapter.weight", "norm.running_mean", "optimizer/exp_avg/adapter.weight", "irongrad/steps"} <= names
    assert part.stat().st_size < whole.stat().st_size / 2
    with load(artifact, checkpoint=part) as session:
        assert [session.train_step(**batch(9)), session.train_step(**batch(10))] == expected
        session.restore(part)
        assert session.train_step(**batch(9)) == expected[0]
        session.restore(whole)
        assert session.train_step(**batch(9)) == expected[0]


def test_iree_run_module_goes_on_from_a_trainable_checkpoint(artifact: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.safetensors"
    with load(artifact) as session:
        session.train_step(**batch(0))
        session.save(part, trainable=True)
        for name, value in batch(1).items():
            np.save(tmp_path / f"{name}.npy", value)
        files = {name: tmp_path / f"{name}.npy" for name in batch(1)}
        command = run_module(session.manifest, artifact, "eval_step", inputs=files, state=part)
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert float(printed.strip().rpartition("=")[2]) == pytest.approx(session.eval_step(**batch(1)), abs=1e-4)


def test_a_trainable_checkpoint_of_another_base_is_refused(artifact: Path, tmp_path: Path) -> None:
    other = compiled(tmp_path / "other", scale=2.0)
    with load(other) as session:
        session.save(tmp_path / "part.safetensors", trainable=True)
    with pytest.raises(ArtifactError, match="was trained on another base"):
        load(artifact, checkpoint=tmp_path / "part.safetensors")
    with load(artifact) as session:
        before = session.state()
        with pytest.raises(ArtifactError, match="was trained on another base"):
            session.restore(tmp_path / "part.safetensors")
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, before[name])


def test_a_step_without_frozen_state_saves_all_of_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    step = ig.TrainStep(model, torch.mean, torch.optim.SGD(model.parameters(), lr=0.1), {"x": torch.ones(2, 3)})
    ig.compile(step, tmp_path / "net")
    with load(tmp_path / "net") as session:
        assert not session.manifest.base
        session.save(tmp_path / "all.safetensors", trainable=True)
        assert set(read_arrays(tmp_path / "all.safetensors")[0]) == {s.name for s in session.manifest.state}


def test_an_artifact_that_only_predicts_has_the_model_alone(artifact: Path, tmp_path: Path) -> None:
    model = Adapted()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    inputs = {"x": torch.randn(8, 6), "y": torch.randint(0, 2, (8,))}
    step = ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)
    ig.compile(step, tmp_path / "predict", entry_points=["predict"])
    with load(artifact) as session:
        session.train_step(**batch(0))
        session.save(tmp_path / "part.safetensors")
        session.save(tmp_path / "whole.safetensors", trainable=False)
        expected = session.predict(x=batch(1)["x"])
    for name in ("part", "whole"):
        with load(tmp_path / "predict", checkpoint=tmp_path / f"{name}.safetensors") as session:
            assert not [s.name for s in session.manifest.state if s.name.startswith("optimizer/")]
            np.testing.assert_allclose(session.predict(x=batch(1)["x"]), expected, atol=1e-6)
