"""A step whose parts have modules of their own trains as one module does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.cli import inspect, profile, rebuild, verify
from irongrad.runtime import Session, load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError, GuardError, UserError

PLACE = {"encoder": "llvm-cpu", "head": "llvm-cpu:cpu=x86-64-v2"}


class Model(nn.Module):
    """Two parts, and a normalisation that neither is named for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(x)))


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = {"x": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))}
    return ig.TrainStep(model, F.cross_entropy, optimizer, inputs, clip_grad_norm=0.5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ig.compile(make_step(), tmp_path_factory.mktemp("placed") / "a", place=PLACE).directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The same step as one module."""
    return ig.compile(make_step(), tmp_path_factory.mktemp("whole") / "a").load()


@pytest.fixture
def placed(directory: Path) -> Session:
    return load(directory)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((5, 6), np.float32), "y": random.integers(0, 3, 5)} for _ in range(20)]


def assert_close(one: Session, other: Session) -> None:
    """The kernels differ, and so may the last bits."""
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_twenty_steps_give_the_same_state(placed, whole, batches):
    whole.reset()
    for batch in batches:
        assert placed.train_step(**batch) == pytest.approx(whole.train_step(**batch), rel=1e-4)
    assert_close(placed, whole)
    assert placed.eval_step(**batches[0]) == pytest.approx(whole.eval_step(**batches[0]), rel=1e-4)
    np.testing.assert_allclose(placed.predict(x=batches[0]["x"]), whole.predict(x=batches[0]["x"]), rtol=1e-3)


def test_gradients_accumulate_on_every_part(placed, whole, batches):
    whole.reset()
    with pytest.raises(GuardError, match="no gradients are accumulated; call grad_step first"):
        placed.apply_step()
    for batch in batches[:3]:
        placed.grad_step(**batch)
        whole.grad_step(**batch)
    (mine, count), (theirs, other) = placed.gradients(), whole.gradients()
    assert count == other == 3
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-4, atol=1e-5, err_msg=name)
    assert placed.apply_step() == whole.apply_step() == 1
    assert_close(placed, whole)
    sums, count = placed.gradients()
    assert count == 0
    assert not any(value.any() for value in sums.values())
    placed.load_gradients(mine, 3)
    assert placed.gradients()[1] == 3
    assert placed.apply_step() == 2


def test_checkpoints_are_those_of_any_artifact(placed, whole, batches, tmp_path, directory):
    for batch in batches[:3]:
        placed.train_step(**batch)
    placed.save(tmp_path / "a.safetensors")
    whole.restore(tmp_path / "a.safetensors")
    resumed = load(directory, checkpoint=tmp_path / "a.safetensors")
    for name, value in resumed.state().items():
        np.testing.assert_array_equal(value, placed.state()[name], err_msg=name)
        np.testing.assert_array_equal(value, whole.state()[name], err_msg=name)
    assert resumed.train_step(**batches[3]) == placed.train_step(**batches[3])
    placed.reset()
    np.testing.assert_array_equal(placed.state()["head.weight"], placed.initial_state()["head.weight"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": np.full(5, 3)}, r"y: every value must be in \[0, 2\]"),
        ({"y": np.zeros(4, np.int64)}, r"train_step: y is int64\[4\]; expected train_step\(x"),
        ({"x": np.zeros((5, 6))}, r"train_step: x is float64\[5, 6\]"),
    ],
)
def test_a_refused_call_leaves_every_part_as_it_was(placed, batches, wrong, message):
    before = placed.state()
    with pytest.raises(GuardError, match=message):
        placed.train_step(**{**batches[0], **wrong})
    for name, value in placed.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_what_is_on_a_device_can_be_an_input(placed, batches):
    on_device = {name: placed.to_device(value) for name, value in batches[0].items()}
    assert placed.eval_step(**on_device) == placed.eval_step(**batches[0])


def test_inspect_shows_the_parts(directory):
    shown = CliRunner().invoke(inspect.command, [str(directory)]).output
    assert "encoder-llvm-cpu" in shown
    assert "train_step: encoder → head → encoder" in shown
    as_json = CliRunner().invoke(inspect.command, [str(directory), "--json"]).output
    assert json.loads(as_json)["commands"] == {}


def test_verify_signs_for_every_part(directory):
    outcome = CliRunner().invoke(verify.command, [str(directory)])
    assert outcome.exit_code == 0, outcome.output
    assert all(len(t.verified) == 1 for t in load(directory).manifest.targets)


def test_what_takes_one_module_is_refused(directory, placed):
    with pytest.raises(ArtifactError, match="each part has its target .encoder on encoder-llvm-cpu, head on"):
        load(directory, device="local-sync")
    with pytest.raises(UserError, match="is compiled with place"):
        run_module(placed.manifest, directory, "train_step")
    with pytest.raises(UserError, match="compile the step itself again"):
        CliRunner().invoke(rebuild.command, [str(directory)], catch_exceptions=False)
    with pytest.raises(UserError, match="a profile is of one module: compile the step without place"):
        CliRunner().invoke(profile.command, [str(directory)], catch_exceptions=False)


def test_gradients_accumulate_without_the_entry_points_that_export_them(tmp_path, batches):
    artifact = ig.compile(make_step(), tmp_path / "a", place=PLACE, entry_points=("grad_step", "apply_step"))
    session = artifact.load()
    session.grad_step(**batches[0])
    first = session.apply_step()
    session.load_state(session.initial_state())
    before = session.state()
    session.grad_step(**batches[0])
    assert (first, session.apply_step()) == (1, 1)
    assert not np.array_equal(session.state()["head.weight"], before["head.weight"])
