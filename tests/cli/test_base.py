"""`--base`: every verb that opens an artifact finds its base file where the user says."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.safetensors_file import read_arrays
from tests.cli.test_golden import agrees, ctest
from tests.runtime.test_base_formats import write_safetensors

STEP = """
import torch
from torch import nn
import irongrad as ig

def make_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    inputs = {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)
"""


def call(verb: str, *arguments: object) -> str:
    command = importlib.import_module(f"irongrad.cli.{verb}").command
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact in `net` whose base was moved to `elsewhere`, and a base of other values in `other.irpa`."""
    place = tmp_path_factory.mktemp("place")
    (place / "step.py").write_text(STEP)
    namespace: dict[str, object] = {}
    exec(compile(STEP, str(place / "step.py"), "exec"), namespace)
    made = namespace["make_step"]()
    ig.compile(made, place / "net", base=place / "model.irpa", cache=False)
    with torch.no_grad():
        made.model[0].weight.add_(1)
    ig.compile(made, place / "wrong", base=place / "other.irpa", entry_points=["predict"], cache=False)
    (place / "elsewhere").mkdir()
    (place / "model.irpa").rename(place / "elsewhere/moved.irpa")
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((12, 8)).astype(np.float32), "y": rng.integers(0, 4, 12, dtype=np.int64)}
    np.savez(place / "data.npz", **arrays)
    np.save(place / "x.npy", arrays["x"][:6])
    return place


@pytest.fixture
def commands(place: Path, tmp_path: Path) -> dict[str, list[object]]:
    """The arguments of each verb, without --base."""
    shutil.copytree(place / "net", tmp_path / "net")
    net = tmp_path / "net"
    return {
        "run": ["run", net, "predict", "--input", f"x={place / 'x.npy'}"],
        "train": ["train", net, "--data", place / "data.npz", "--checkpoint", tmp_path / "net.safetensors"],
        "verify": ["verify", net],
        "golden": ["golden", net, "-o", tmp_path / "golden", "--json"],
        "inspect": ["inspect", net, "--json"],
        "rebuild": ["rebuild", net],
        "export torch": ["export", net, "--to", "torch", "-o", tmp_path / "model.safetensors"],
        "export inference": [
            *("export", net, "--to", "inference", "-o", tmp_path / "predict"),
            *("--model", f"{place / 'step.py'}:make_step"),
        ],
    }


VERBS = ["run", "train", "verify", "golden", "inspect", "rebuild", "export torch", "export inference"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_takes_the_base_from_where_the_user_says(place: Path, commands: dict[str, list[object]], verb: str):
    with pytest.raises(ArtifactError, match=r"model\.irpa of .* cannot be read: .*--base FILE"):
        call(*commands[verb])
    with pytest.raises(ArtifactError, match=r"other\.irpa is not the base of"):
        call(*commands[verb], "--base", place / "other.irpa")
    call(*commands[verb], "--base", place / "elsewhere/moved.irpa")


def test_the_exported_model_has_the_tensors_of_the_base(place: Path, commands: dict[str, list[object]], tmp_path: Path):
    call(*commands["export torch"], "--base", place / "elsewhere/moved.irpa")
    arrays, _ = read_arrays(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    np.testing.assert_array_equal(arrays["0.weight"], nn.Linear(8, 16).weight.detach().numpy())


def test_unpacked_golden_values_name_the_base(place: Path, commands: dict[str, list[object]], tmp_path: Path):
    report = json.loads(call(*commands["golden"], "--base", place / "elsewhere/moved.irpa"))
    (check,) = [c for c in report["checks"] if c["name"].endswith(".predict")]
    assert agrees(check)
    result = ctest(tmp_path / "golden")
    assert result.returncode == 0, result.stdout


def test_printed_commands_name_the_base(place: Path, commands: dict[str, list[object]]):
    base = place / "elsewhere/moved.irpa"
    printed = json.loads(call(*commands["inspect"], "--base", base))
    command = printed["commands"]["predict"]
    assert f"--parameters=base={base}" in command
    assert subprocess.run(command, shell=True, capture_output=True, check=False).returncode == 0
    assert f"--parameters=base={base}" in printed["scripts"]["train_and_export"]


def test_compile_says_what_is_shared_and_what_is_copied(place: Path, tmp_path: Path):
    (tmp_path / "step.py").write_text(STEP)
    torch.manual_seed(0)
    layer = nn.Linear(8, 16)
    step = ["compile", f"{tmp_path / 'step.py'}:make_step", "--entry-point", "predict", "-o", tmp_path / "net"]
    for shift, copied in ((0, False), (8, True)):
        write_safetensors(tmp_path / "model.safetensors", {"first.weight": layer.weight.detach().numpy()}, shift)
        printed = call(*step, "--base", tmp_path / "model.safetensors")
        assert "model.safetensors: 0.5KiB in 1 tensors; not in it, so in the artifact: 0.bias\n" in printed
        assert ("each process copies 0.5KiB of it, because these tensors" in printed) == copied
