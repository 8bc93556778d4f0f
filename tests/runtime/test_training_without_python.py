"""Training by a shell script: the state goes from file to file, and no moment of death loses or changes it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import iree._runtime_libs
import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.commands import EXAMPLE_SIZE, training_script
from irongrad.runtime.manifest import TRAIN_AND_EXPORT
from irongrad.runtime.safetensors_file import opened

FILES = 30
LOOP = """
while number=$(($(steps) / K)) && [ "$number" -lt "$FILES" ]; do
    train "data/$number" >>log 2>&1 || exit 1
done
"""


class Dropping(nn.Module):
    """A frozen embedding, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Embedding(50, 64)
        self.base.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.base(x).mean(1)))


def make_step() -> ig.TrainStep:
    model = Dropping()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    inputs = {"x": torch.randint(0, 50, (8, 3)), "y": torch.randint(0, 4, (8,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shell") / "net"
    ig.compile(make_step(), directory, entry_points=["train_steps", TRAIN_AND_EXPORT, "predict"])
    return directory


def data(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {"x": rng.integers(0, 50, (EXAMPLE_SIZE, 8, 3)), "y": rng.integers(0, 4, (EXAMPLE_SIZE, 8))}


@pytest.fixture
def place(artifact: Path, tmp_path: Path) -> Path:
    """A directory with the data, the script, and a PATH without Python."""
    (tmp_path / "data").mkdir()
    for number in range(FILES):
        for name, array in data(number).items():
            np.save(tmp_path / f"data/{number}.{name}.npy", array)
    with load(artifact) as session:
        script = training_script(session.manifest, artifact, TRAIN_AND_EXPORT)
    (tmp_path / "train.sh").write_text(script + LOOP)
    (tmp_path / "bin").mkdir()
    tool = Path(iree._runtime_libs.__file__).with_name("iree-run-module")
    (tmp_path / "bin/iree-run-module").symlink_to(tool)
    for name in ("cp", "ls", "mv", "od", "seq", "sync"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def started(place: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": str(place / "bin"), "FILES": str(FILES)}
    bash = shutil.which("bash") or "bash"
    return subprocess.Popen([bash, "train.sh"], cwd=place, env=environment, start_new_session=True)


def test_a_script_that_is_killed_at_any_moment_trains_as_a_session_does(artifact: Path, place: Path) -> None:
    moments, kills = random.Random(0), 0
    while True:
        process = started(place)
        try:
            assert process.wait(moments.uniform(0.01, 0.04 + kills / 50)) == 0, (place / "log").read_text()
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills > 4
    with load(artifact) as session:
        losses = [session.train_steps(**data(number)) for number in range(FILES)]
        state = session.state()
        session.restore(place / "trained.safetensors")
        for name, array in session.state().items():
            assert array.tobytes() == state[name].tobytes(), name
    for number, expected in enumerate(losses):
        np.testing.assert_array_equal(np.load(place / f"data/{number}.losses.npy"), expected)


def test_the_checkpoint_is_one_of_the_trainable_state(artifact: Path, place: Path) -> None:
    assert started(place).wait(120) == 0
    with opened(place / "trained.safetensors") as file:
        names = file.header.tensors
    assert {"head.0.weight", "norm.running_var", "irongrad/steps", "irongrad/seed", "irongrad/draws"} <= names.keys()
    assert "base.weight" not in names
    x = np.arange(24).reshape(8, 3)
    with load(artifact, checkpoint=place / "trained.safetensors") as session:
        expected = session.predict(x=x)
        assert session.state()["irongrad/steps"] == FILES * EXAMPLE_SIZE
        session.save(place / "again.safetensors", trainable=True)
    with load(artifact, checkpoint=place / "again.safetensors") as session:
        np.testing.assert_array_equal(session.predict(x=x), expected)


def test_a_refused_file_leaves_the_checkpoint_as_it_is(place: Path) -> None:
    np.save(place / "data/1.y.npy", np.full((EXAMPLE_SIZE, 8), 7))
    assert started(place).wait(120) == 1
    assert "y: every value must be in [0, 3]" in (place / "log").read_text()
    with opened(place / "trained.safetensors") as file:
        assert file.array("irongrad/steps") == EXAMPLE_SIZE


def test_a_session_calls_it_too(artifact: Path) -> None:
    with load(artifact) as one, load(artifact) as other:
        outputs = one.call(TRAIN_AND_EXPORT, data(0))
        np.testing.assert_array_equal(outputs[0], other.train_steps(**data(0)))
        state = other.state()
        for spec, array in zip(one.entry(TRAIN_AND_EXPORT).outputs[1:], outputs[1:], strict=True):
            np.testing.assert_array_equal(array, state[spec.name])
