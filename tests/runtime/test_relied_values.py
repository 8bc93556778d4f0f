"""A step whose Python code read values of its buffers is right for these values alone: state with others is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.runtime import checkpoint, load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError, CaptureError, GuardError
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.session import Session

# For each buffer that the model reads, other values.
OTHERS = {
    "scale": np.float32(3),
    "times": np.array(1, np.int64),
    "kept": np.array([True, True, False, True]),
    "pair": np.array([[1, 2.5]], ml_dtypes.bfloat16),
}


class Reads(nn.Module):
    """Reads a float, an integer, a mask and a matrix of bfloat16; `free` it only multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("times", torch.tensor(2))
        self.register_buffer("kept", torch.tensor([True, False, True, True]))
        self.register_buffer("pair", torch.tensor([[1, 2]], dtype=torch.bfloat16))
        self.register_buffer("free", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, self.kept.nonzero().flatten()] * self.pair.tolist()[0][1]
        for _ in range(int(self.times)):
            x = nn.functional.pad(x, (0, 0)).tanh()
        return self.linear(nn.functional.pad(x, (0, 1))) * float(self.scale) * self.free


def make_step(model: nn.Module | None = None) -> ig.TrainStep:
    made = model or Reads()
    inputs = {"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,))}
    return ig.TrainStep(made, cross_entropy, torch.optim.SGD(made.parameters(), lr=0.1), inputs)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("relied") / "net"
    ig.compile(make_step(), directory, entry_points=["train_step", "predict", "export_state", "import_state", "reset"])
    return directory


@pytest.fixture
def session(artifact: Path) -> Session:
    return load(artifact)


def test_the_manifest_names_the_line_and_the_values(artifact):
    relied = read_manifest(artifact).relied
    assert relied.keys() == OTHERS.keys()
    assert relied["scale"].line.startswith("test_relied_values.py:")
    assert "float(self.scale)" in relied["scale"].line
    assert relied["kept"].values == "[True, False, True, True]"


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_refused(session, name, tmp_path):
    before = session.state()
    file = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({**before, name: np.asarray(OTHERS[name])}, file)
    calls = (
        lambda: session.update_state({name: OTHERS[name]}),
        lambda: session.load_state({**before, name: OTHERS[name]}),
        lambda: session.restore(file),
        lambda: load(session.directory, checkpoint=file),
    )
    for call in calls:
        with pytest.raises(ArtifactError, match=rf"{name}, and the step was compiled for .*test_relied_values\.py:\d+"):
            call()
    assert {n: a.tobytes() for n, a in session.state().items()} == {n: a.tobytes() for n, a in before.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_the_module_refuses_them_too(session, name, monkeypatch):
    monkeypatch.setattr(checkpoint, "_refuse_others", lambda *arguments: None)
    before = session.state()
    with pytest.raises(GuardError, match=f"compiled for the values of {name} at this line"):
        session.update_state({name: OTHERS[name], "linear.bias": np.ones(3, np.float32)})
    assert {n: a.tobytes() for n, a in session.state().items()} == {n: a.tobytes() for n, a in before.items()}


def test_all_other_state_may_change(session, tmp_path):
    session.update_state({"free": np.float32(2), "linear.bias": np.ones(3, np.float32)})
    session.save(tmp_path / "own.safetensors")
    resumed = load(session.directory, checkpoint=tmp_path / "own.safetensors")
    x = np.ones((5, 4), np.float32)
    assert np.array_equal(resumed.predict(x=x), session.predict(x=x))
    session.reset()
    assert session.state()["free"] == 1


@pytest.mark.parametrize("name", ["", *OTHERS])
def test_a_module_that_runs_alone_refuses_a_checkpoint(
    session: Session,
    name: str,
    tmp_path: Path,
    iree_run: Callable[[list[str]], subprocess.CompletedProcess[str]],
) -> None:
    state = session.state()
    if name:
        state[name] = np.asarray(OTHERS[name])
    file = tmp_path / "given.safetensors"
    safetensors.numpy.save_file(state, file)
    command = run_module(session.manifest, session.directory, "predict", state=file)
    done = iree_run(command)
    assert (done.returncode == 0) == (not name), done.stderr
    assert not name or f"compiled for the values of {name} at this line" in done.stderr


class Moves(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        return self.linear(x) * self.scale


def test_a_second_step_may_not_change_them():
    reads = Reads()
    moves = Moves()
    moves.scale = reads.scale
    with pytest.raises(CaptureError, match=r"float\(self\.scale\)(.|\n)*another step changes"):
        ig.compile(ig.Steps({"reads": make_step(reads), "moves": make_step(moves)}), "unused")
