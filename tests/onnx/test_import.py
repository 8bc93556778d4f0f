"""`irongrad import model.onnx`: from a file and four names to an artifact that trains."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from irongrad.cli.main import cli
from irongrad.onnx.step import make_step, options_of
from irongrad.runtime import load
from irongrad.runtime.errors import UserError


@pytest.fixture
def data(family: Callable[[str], Any], tmp_path: Path) -> Path:
    """A file of 64 samples for the exported MLP of the examples."""
    _, (x,), _ = family("mlp")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 64)
    images = rng.standard_normal((64, *x.shape[1:])).astype(np.float32) * 0.1 + labels[:, None, None] / 10
    np.savez(tmp_path / "data.npz", input=images.astype(np.float32), label=labels)
    return tmp_path / "data.npz"


def run(source: Path, output: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["import", str(source), "-o", str(output), "--no-cache", "--json", *options])


def test_an_onnx_model_trains(family: Callable[[str], Any], data: Path, tmp_path: Path) -> None:
    """The compiled and verified step takes the same steps as eager PyTorch with the original model."""
    step, _, file = family("mlp")
    named = ["--data", str(data), "--batch-size", "16", "--loss", "cross_entropy", "--optimizer", "AdamW"]
    points = ["--entry-point", "train_step", "--entry-point", "predict"]
    result = run(file, tmp_path / "out", *named, "--lr", "0.01", "--set", "weight_decay=0.1", *points)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["targets"]["llvm-cpu"] <= 1
    session = load(tmp_path / "out")
    model = copy.deepcopy(step.model).train()
    model.load_state_dict({n: torch.from_numpy(session.state()[n]) for n in model.state_dict()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with np.load(data) as file_of_arrays:
        x, y = file_of_arrays["input"], file_of_arrays["label"]
    for start in [0, 16, 32, 48] * 3:
        rows = slice(start, start + 16)
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(session.train_step(input=x[rows], label=y[rows]) - loss.item()) < 1e-4
    np.testing.assert_allclose(session.predict(input=x[:16]), model(torch.from_numpy(x[:16])).detach(), atol=1e-3)
    session.save(tmp_path / "trained.safetensors")
    assert {"1.weight", "optimizer/exp_avg/1.weight"} <= set(session.state())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": "cross_entropi"}, "there is no loss 'cross_entropi'"),
        ({"optimizer": "Adamm"}, "there is no optimizer 'Adamm'"),
        ({"options": {"speed": 1}}, "does not take these options"),
        ({"batch": 1000}, "has 64 rows of input, fewer than a batch of 1000"),
        ({"data": {"x": np.zeros((64, 3))}}, "the model takes input; the data has x, and not input"),
        ({"freeze": ["*"]}, "nothing to train"),
        ({"output": "logits"}, "has no output 'logits'"),
    ],
)
def test_wrong_names_are_refused(changed: dict[str, Any], said: str, family: Callable[[str], Any], data: Path) -> None:
    with np.load(data) as file:
        right = {
            "data": dict(file),
            "batch": 16,
            "loss": "CrossEntropyLoss",
            "optimizer": "SGD",
            "options": {"lr": 0.1},
        }
    assert set(make_step(family("mlp").file, **right).inputs) == {"input", "label"}
    with pytest.raises(UserError, match=said):
        make_step(family("mlp").file, **(right | changed))


def test_options_are_python_literals() -> None:
    assert options_of({"betas": "(0.9, 0.99)", "amsgrad": "True"}) == {"betas": (0.9, 0.99), "amsgrad": True}
    with pytest.raises(UserError, match="--set betas=twice"):
        options_of({"betas": "twice"})


def test_the_command_names_missing_options(family: Callable[[str], Any], tmp_path: Path) -> None:
    result = run(family("mlp").file, tmp_path / "out", "--loss", "cross_entropy")
    assert "an ONNX model also needs --data, --batch-size, --optimizer" in str(result.exception)
