"""`irongrad import model.onnx`: from a file and four names to an artifact that trains."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import helper, numpy_helper

from irongrad.cli.main import cli
from irongrad.onnx.step import make_step, options_of
from irongrad.runtime import load
from irongrad.runtime.errors import GuardError, UserError
from irongrad.training.numpy_files import read_npz


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
        ({"loss": "Linear"}, "torch.nn.Linear needs arguments .* give a function of your own"),
        ({"optimizer": "Adam", "options": {"betas": (0.9,)}}, "torch.optim.Adam does not take these options"),
        ({"added": {"temperature": np.float32(2)}}, "temperature is a single number; the first dimension"),
        ({"added": {"names": np.array(["a"] * 64)}}, "names has elements of type <U1; give numbers"),
        ({"added": {"label.": np.zeros(64), "label_": np.zeros(64)}}, "'label.' and 'label_' would both be the input"),
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
    given = right | changed
    given["data"] = given["data"] | given.pop("added", {})
    with pytest.raises(UserError, match=said):
        make_step(family("mlp").file, **given)


def test_data_of_a_type_that_would_lose_values_is_refused(family: Callable[[str], Any], data: Path) -> None:
    with np.load(data) as file:
        arrays = {"input": file["input"].astype(np.float64), "label": file["label"]}
    with pytest.raises(UserError, match="has float64 for the input 'input', and the ONNX file is made for float32"):
        make_step(family("mlp").file, arrays, 16, loss="cross_entropy", optimizer="SGD", options={"lr": 0.1})


def test_a_loss_of_torchs_takes_one_of_several_outputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    given, *made = (helper.make_tensor_value_info(n, 1, ["n", 3]) for n in "xyz")
    graph = helper.make_graph(nodes, "g", [given], made, [numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    data = {"x": np.ones((8, 3), ">f4"), "label": np.zeros(8, np.int64)}
    named = {"loss": "cross_entropy", "optimizer": "SGD", "options": {"lr": 0.1}}
    with pytest.raises(UserError, match=r"has the outputs y, z, and the loss cross_entropy takes one: name it"):
        make_step(tmp_path / "m.onnx", data, 4, **named)
    assert make_step(tmp_path / "m.onnx", data, 4, **named, output="z").inputs["x"].dtype is torch.float32


def test_training_finds_arrays_under_the_names_of_the_file(tmp_path: Path) -> None:
    """`input:0` is the input `input_0` of the step."""
    np.savez(tmp_path / "a.npz", **{"input:0": np.ones(3), "label": np.zeros(3)})
    arrays = read_npz(tmp_path / "a.npz", ["input_0", "label"])
    assert arrays["input_0"].tolist() == [1, 1, 1]
    np.savez(tmp_path / "b.npz", **{"input:0": np.ones(3), "input.0": np.zeros(3), "x": np.ones(3)})
    with pytest.raises(GuardError, match="has the arrays input:0, input.0, x; the step also needs input_0"):
        read_npz(tmp_path / "b.npz", ["input_0"])


OWN = """
import torch

def smoothed(output, label):
    return torch.nn.functional.cross_entropy(output, label, label_smoothing=0.1)

def slow(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr / 10)

def nothing(parameters, lr):
    return lr
"""


def test_a_loss_and_an_optimizer_of_ones_own_and_sizes_that_vary(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    given, made = (helper.make_tensor_value_info(n, 1, ["n", k]) for n, k in (("x", 3), ("y", 4)))
    graph = helper.make_graph(nodes, "g", [given], [made], [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    x, label = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32), np.arange(8) % 4
    np.savez(tmp_path / "data.npz", x=x, label=label)
    (tmp_path / "own.py").write_text(OWN)
    options = ["--data", str(tmp_path / "data.npz"), "--batch-size", "4", "--loss", f"{tmp_path}/own.py:smoothed"]
    options += ["--lr", "1", "--dynamic", "x=0:B", "--dynamic", "label:0=B", "--entry-point", "train_step"]
    options += ["--optimizer", f"{tmp_path}/own.py:slow", "--opt-level", "1"]
    result = run(tmp_path / "m.onnx", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    session, w = load(tmp_path / "out"), torch.from_numpy(weight).requires_grad_()
    for size in (4, 2, 8):
        loss = torch.nn.functional.cross_entropy(
            torch.from_numpy(x[:size]) @ w, torch.from_numpy(label[:size]), label_smoothing=0.1
        )
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - 0.1 * gradient).detach().requires_grad_()
        assert abs(session.train_step(x=x[:size], label=label[:size]) - loss.item()) < 1e-5
    options[options.index(f"{tmp_path}/own.py:slow")] = f"{tmp_path}/own.py:nothing"
    assert "nothing returned a float" in str(run(tmp_path / "m.onnx", tmp_path / "no", *options).exception)


@pytest.mark.parametrize("buckets", [[], ["--bucket", "B=2,8"], ["--bucket", "B=8", "--bucket", "T=6"]])
def test_two_sizes_vary_and_some_have_buckets(buckets: list[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("ReduceMean", ["h", "one"], ["y"])]
    nodes[1].attribute.append(helper.make_attribute("keepdims", 0))
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    given = helper.make_tensor_value_info("x", 1, ["n", "t", 3])
    made = helper.make_tensor_value_info("y", 1, ["n", 4])
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([1]), "one")]
    graph = helper.make_graph(nodes, "g", [given], [made], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    rng = np.random.default_rng(1)
    x, label = rng.standard_normal((8, 5, 3)).astype(np.float32), np.arange(8) % 4
    np.savez(tmp_path / "data.npz", x=x, label=label)
    options = [
        "--data",
        str(tmp_path / "data.npz"),
        "--batch-size",
        "4",
        "--loss",
        "cross_entropy",
        "--optimizer",
        "SGD",
    ]
    options += ["--lr", "0.5", "--dynamic", "x=0:B", "--dynamic", "x=1:T", "--dynamic", "label=0:B", "--opt-level", "1"]
    result = run(tmp_path / "m.onnx", tmp_path / "out", *options, *buckets)
    assert result.exit_code == 0, result.output
    with load(tmp_path / "out") as session:
        w = torch.from_numpy(weight).requires_grad_()
        for rows, length in ((4, 5), (1, 2), (8, 6), (2, 1)):
            inputs = rng.standard_normal((rows, length, 3)).astype(np.float32)
            loss = torch.nn.functional.cross_entropy(
                (torch.from_numpy(inputs) @ w).mean(1), torch.from_numpy(label[:rows])
            )
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w - 0.5 * gradient).detach().requires_grad_()
            assert abs(session.train_step(x=inputs, label=label[:rows]) - loss.item()) < 1e-5


@pytest.mark.parametrize("given", [("--dynamic", "x0B"), ("--bucket", "B=many")])
def test_badly_written_sizes_are_refused(
    given: tuple[str, str], family: Callable[[str], Any], data: Path, tmp_path: Path
) -> None:
    named = ["--data", str(data), "--batch-size", "16", "--loss", "cross_entropy", "--optimizer", "SGD", "--lr", "1"]
    result = run(family("mlp").file, tmp_path / "out", *named, *given)
    assert f"{given[0]} {given[1]!r} is not" in str(result.exception)


def test_options_are_python_literals() -> None:
    assert options_of({"betas": "(0.9, 0.99)", "amsgrad": "True"}) == {"betas": (0.9, 0.99), "amsgrad": True}
    with pytest.raises(UserError, match="--set betas=twice"):
        options_of({"betas": "twice"})


def test_the_command_names_missing_options(family: Callable[[str], Any], tmp_path: Path) -> None:
    result = run(family("mlp").file, tmp_path / "out", "--loss", "cross_entropy")
    assert "an ONNX model also needs --data, --batch-size, --optimizer" in str(result.exception)
