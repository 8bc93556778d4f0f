"""`irongrad train` on steps whose sizes vary: any size, and buckets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.cli import inspect
from irongrad.cli.train import command
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError

WAYS: dict[str, dict[str, Any]] = {"any size": {}, "buckets": {"buckets": {"B": [4, 8], "T": [3, 6]}}}


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().mean(1)


def _step(**options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Mean()
    inputs = {"x": torch.randn(4, 5, 2), "y": torch.zeros(4, dtype=torch.int64)}
    dynamic = {"x": {0: "B", 1: "T"}, "y": {0: "B"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs, dynamic=dynamic, **options)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for name, options in WAYS.items():
        directories[name] = tmp_path_factory.mktemp("sizes") / "step"
        ig.compile(_step(**options), directories[name])
    return directories


def _data(path: Path, samples: int, length: int) -> Path:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, length, 2)).astype(np.float32)
    np.savez(path, x=x, y=rng.integers(0, 3, samples))
    return path


def _train(artifact: Path, *arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(command, [str(artifact), "--json", *map(str, arguments)], catch_exceptions=False)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("size", [1, 6, 16])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_any_size_trains(artifacts: dict[str, Path], way: str, size: int, tmp_path: Path) -> None:
    data = _data(tmp_path / "data.npz", 20, 5)
    (epoch,) = _train(artifacts[way], "--data", data, "--batch-size", size)["epochs"]
    assert epoch["steps"] == 20 // size


@pytest.mark.parametrize(("way", "steps"), [("any size", 2), ("buckets", 8)])
def test_the_usual_batch_is_the_largest_bucket_or_32(
    artifacts: dict[str, Path], way: str, steps: int, tmp_path: Path
) -> None:
    (epoch,) = _train(artifacts[way], "--data", _data(tmp_path / "data.npz", 64, 4))["epochs"]
    assert epoch["steps"] == steps


@pytest.mark.parametrize("way", WAYS)
def test_all_samples_are_evaluated(artifacts: dict[str, Path], way: str, tmp_path: Path) -> None:
    data = _data(tmp_path / "data.npz", 7, 4)
    options = ("--validation", data, "--batch-size", 3, "--lr", 0)
    (epoch,) = _train(artifacts[way], "--data", data, *options)["epochs"]
    with np.load(data) as arrays:
        expected = Session(artifacts[way]).eval_step(x=arrays["x"], y=arrays["y"])
    assert epoch["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_data_of_less_than_a_batch_are_refused_with_the_way_out(artifacts: dict[str, Path], tmp_path: Path) -> None:
    data = _data(tmp_path / "data.npz", 20, 5)
    with pytest.raises(GuardError, match="has 20 samples, fewer than one batch of 32; give a smaller --batch-size"):
        _train(artifacts["any size"], "--data", data)
    none = _data(tmp_path / "none.npz", 0, 5)
    with pytest.raises(GuardError, match=r"none\.npz has 0 samples, fewer than one batch of 1"):
        _train(artifacts["any size"], "--data", data, "--batch-size", 4, "--validation", none)


def test_a_size_beyond_the_buckets_is_refused_unless_it_can_be_accumulated(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    options = ("--data", _data(tmp_path / "data.npz", 30, 5), "--batch-size", 11)
    (epoch,) = _train(artifacts["buckets"], *options)["epochs"]
    assert epoch["steps"] == 2
    ig.compile(_step(buckets={"B": [8], "T": [6]}), tmp_path / "step", opt_level=0, entry_points=["train_step"])
    with pytest.raises(GuardError, match="takes B from 1 to 8, and 11 is no multiple of such a size"):
        _train(tmp_path / "step", *options)


def test_arrays_of_another_rank_are_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "flat.npz", x=np.zeros((8, 2), np.float32), y=np.zeros(8, np.int64))
    with pytest.raises(GuardError, match=r"x is float32\[8, 2\], the step takes float32\[N, T, 2\]"):
        _train(artifacts["any size"], "--data", tmp_path / "flat.npz")


def test_a_pasted_command_has_sizes_that_the_step_accepts(tmp_path: Path) -> None:
    ig.compile(_step(constraints=["4 <= T"]), tmp_path / "step", entry_points=("train_step", "train_steps", "predict"))
    result = CliRunner().invoke(inspect.command, [str(tmp_path / "step"), "--json"], catch_exceptions=False)
    for command_line in json.loads(result.stdout)["commands"].values():
        subprocess.run(command_line, shell=True, check=True)
