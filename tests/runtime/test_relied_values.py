"""State is refused whose values differ from those at capture on which a step relies."""

from __future__ import annotations

import subprocess
import sys
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
    assert {name for name, spec in relied.items() if spec.line} == OTHERS.keys()
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
    with pytest.raises(GuardError, match=f"compiled for the values of {name} at capture"):
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
    assert not name or f"compiled for the values of {name} at capture" in done.stderr


class Moves(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        return self.linear(x) * self.scale


def test_a_second_step_may_not_change_them():
    reads = Reads()
    moves = Moves()
    moves.scale = reads.scale
    with pytest.raises(CaptureError, match=r"float\(self\.scale\)(.|\n)*after_step or another step changes"):
        ig.compile(ig.Steps({"reads": make_step(reads), "moves": make_step(moves)}), "unused")


class Indexed(nn.Module):
    """Looks rows up by buffers that no step changes: whole numbers, and floats."""

    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("place", torch.tensor([1, 3, 0, 3, 2], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rows(self.place.long()) * x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_values_that_an_index_comes_from_may_change_within_their_bounds(dtype, tmp_path, monkeypatch):
    artifact = ig.compile(make_step(Indexed(dtype)), tmp_path / "net")
    session = load(tmp_path / "net")
    kind = session.state()["place"].dtype
    assert session.manifest.relied["place"].bounds == (0, 3)
    other = np.array([3, 3, 1, 0, 1]).astype(kind)
    session.update_state({"place": other})
    model = Indexed(dtype)
    model.place.copy_(torch.tensor([3, 3, 1, 0, 1]))
    x = np.ones((5, 4), np.float32)
    assert np.allclose(session.predict(x=x), model(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    wrong = [np.array([0, 0, 4, 0, 0]).astype(kind)]
    wrong += [np.array([0, 0, 0, 0, -1]).astype(kind)] if dtype is not torch.uint8 else []
    wrong += [np.array([0, np.nan, 0, 0, 0]).astype(kind)] if dtype.is_floating_point else []
    for values in wrong:
        with pytest.raises(ArtifactError, match=r"place outside of \[.*self\.rows\(self\.place\.long\(\)\)"):
            session.update_state({"place": values})
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "_refuse_others", lambda *arguments: None)
            with pytest.raises(GuardError, match="compiled for the values of place at capture, in"):
                session.update_state({"place": values})
    assert session.state()["place"].tobytes() == other.tobytes()
    assert artifact.manifest.relied.keys() == {"place"}


class OfTheProgram(nn.Module):
    """Has a constant, and a buffer that no `state_dict` holds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.table = torch.arange(3.0) * factor
        self.register_buffer("passing", torch.full((3,), factor), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table + self.passing


def test_a_checkpoint_of_another_program_brings_no_constants(tmp_path):
    ig.compile(make_step(OfTheProgram(1)), tmp_path / "old")
    ig.compile(make_step(OfTheProgram(2)), tmp_path / "new")
    old, new = load(tmp_path / "old"), load(tmp_path / "new")
    old.save(tmp_path / "old.safetensors")
    for call in (new.restore, lambda path: load(tmp_path / "new", checkpoint=path)):
        with pytest.raises(ArtifactError, match=r"(passing|constant/).*no state_dict holds it"):
            call(tmp_path / "old.safetensors")
    new.load_state({name: old.state()[name] for name in OfTheProgram(2).state_dict()})
    x = np.ones((5, 4), np.float32)
    expected = OfTheProgram(2)(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(new.predict(x=x), expected, atol=1e-5)


def test_inspect_lists_what_the_program_relies_on(artifact):
    command = [sys.executable, "-m", "irongrad", "inspect", str(artifact)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = " ".join(shown.partition("relies on")[2].partition("\nstate ─")[0].split())
    assert "[True, False, True, True]" in table
    assert "float(self.scale)" in table
    assert "constant/" not in table
