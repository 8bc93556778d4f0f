"""`irongrad train` on a mostly frozen step with weight decay by group, clipping and accumulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.training import schedules
from tests.cli.test_train import run


def make_step(seed: int = 0) -> ig.TrainStep:
    """A frozen layer below a trained one, whose bias does not decay."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    model[0].requires_grad_(requires_grad=False)
    groups = [{"params": [model[2].weight], "weight_decay": 0.1}, {"params": [model[2].bias], "weight_decay": 0.0}]
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        inputs={"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))},
        clip_grad_norm=1.0,
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ig.compile(make_step(), tmp_path_factory.mktemp("adapter") / "net").directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """120 samples: 20 steps of 6, or 10 of 12."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((120, 8)).astype(np.float32), "y": rng.integers(0, 4, 120, dtype=np.int64)}
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path / "data.npz"


def test_decay_by_group_clipping_and_accumulation_are_eagers(artifact: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    settings = ("--set", "weight_decay_0=0.3", "--set", "clip_grad_norm=0.2")
    run(artifact, data, *settings, "--batch-size", 12, "--epochs", 2, "--schedule", "linear", "--checkpoint", path)

    step, arrays = make_step(), dict(np.load(data))
    (optimizer,) = step.optimizers
    optimizer.param_groups[0]["weight_decay"] = 0.3
    rates = schedules.linear(1e-2, 20)
    for number in range(20):
        epoch, place = divmod(number, 10)
        rows = np.random.default_rng((0, epoch)).permutation(120)[place * 12 :][:12]
        x, y = (torch.from_numpy(arrays[n][rows]) for n in ("x", "y"))
        optimizer.zero_grad()
        nn.functional.cross_entropy(step.model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(step.trained, 0.2)
        assert norm > 0.2
        for group in optimizer.param_groups:
            group["lr"] = rates(number)["lr"]
        optimizer.step()
    saved, _ = read_arrays(path)
    for name, parameter in step.model[2].named_parameters():
        np.testing.assert_allclose(saved[f"2.{name}"], parameter.detach().numpy(), atol=2e-6)
    unclipped = run(artifact, data, "--batch-size", 12, "--epochs", 2, "--set", "clip_grad_norm=inf")
    assert unclipped["epochs"][1]["loss"] != run(artifact, data, "--batch-size", 12, "--epochs", 2)["epochs"][1]["loss"]


def test_it_resumes_to_the_bit_from_the_trainable_state(artifact: Path, data: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.safetensors", tmp_path / "rest.safetensors"
    common = ("--schedule", "cosine:total=45", "--ema", 0.9, "--steps")
    run(artifact, data, *common, 45, "--checkpoint", whole)
    run(artifact, data, *common, 27, "--checkpoint", rest)
    assert not {"0.weight", "0.bias"} & read_arrays(rest)[0].keys()
    run(artifact, data, *common, 45, "--checkpoint", rest, "--resume", rest)
    for file in ("{}.safetensors", "{}.ema.safetensors"):
        assert (tmp_path / file.format("rest")).read_bytes() == (tmp_path / file.format("whole")).read_bytes()
    with load(artifact, checkpoint=tmp_path / "rest.ema.safetensors") as averaged, load(artifact) as initial:
        np.testing.assert_array_equal(averaged.state()["0.weight"], initial.state()["0.weight"])


def test_a_checkpoint_of_another_base_is_refused_and_stays(artifact: Path, data: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "net.safetensors", tmp_path / "log.jsonl"
    run(artifact, data, "--checkpoint", path)
    before = path.read_bytes()
    other = ig.compile(make_step(seed=1), tmp_path / "other").directory
    with pytest.raises(ArtifactError, match="was trained on another base: its frozen tensors have the sha256"):
        run(other, data, "--resume", path, "--checkpoint", path, "--log", log)
    assert path.read_bytes() == before
    assert not log.exists()


def test_settings_that_the_artifact_lacks_are_refused(mlp_artifact: Path, data: Path) -> None:
    with pytest.raises(GuardError, match="takes no argument 'clip_grad_norm'"):
        run(mlp_artifact, data, "--set", "clip_grad_norm=1")
    with pytest.raises(UserError, match="--ema needs --checkpoint or --validation"):
        run(mlp_artifact, data, "--ema", 0.9)
