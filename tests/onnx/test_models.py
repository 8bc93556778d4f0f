"""ONNX files of the examples' models, of scikit-learn's models and of small hand-written ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import irongrad as ig
import irongrad.onnx
from irongrad.onnx.load import from_proto
from irongrad.pipeline.capture.capture import capture
from irongrad.runtime.argument_names import arguments_of
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError


def run_onnxruntime(file: Path, *inputs: torch.Tensor) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True)))


def small(
    nodes: list[onnx.NodeProto], arrays: dict[str, np.ndarray], shape: list[Any], **options: Any
) -> onnx.ModelProto:
    """A model from `x` to `y`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "small", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", options.get("opset", 21))])


@pytest.mark.parametrize("name", ["mlp", "digits", "resnet18", "gpt"])
def test_an_imported_model_matches_the_model_that_was_exported(name: str, family: Callable[[str], Any]) -> None:
    """Outputs match onnxruntime; in training mode, in float64, outputs, gradients and statistics match the model."""
    step, inputs, file = family(name)
    read = irongrad.onnx.load(file)
    (expected,) = run_onnxruntime(file, *inputs)
    with torch.no_grad():
        found = read.eval()(*inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * float(np.abs(expected).max()))

    own, read = copy.deepcopy(step.model).double().train(), read.double().train()
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    theirs, mine = own(*wide), read(*wide)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs.backward(direction)
    mine.backward(direction)
    gradients = {n: p.grad for n, p in read.named_parameters()}
    known = {id(p): n for n, p in own.named_parameters(remove_duplicate=False)}  # tied weights keep their last name
    assert len(known) == len(gradients)
    for parameter_name, parameter in own.named_parameters():
        gradient = gradients[parameter_name] if parameter_name in gradients else gradients[known[id(parameter)]]
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-11)
    for buffer_name, buffer in read.named_buffers():
        torch.testing.assert_close(buffer, own.get_buffer(buffer_name).double(), rtol=1e-12, atol=1e-14)


def test_a_model_of_scikit_learn_goes_on_learning(tmp_path: Path) -> None:
    from skl2onnx import to_onnx
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32)
    learned = MLPClassifier((16,), max_iter=3, random_state=0)
    with pytest.warns(UserWarning, match="Maximum iterations"):
        learned.fit(x, labels)
    file = tmp_path / "mlp.onnx"
    file.write_bytes(to_onnx(learned, x[:1], options={"zipmap": False}).SerializeToString())
    with pytest.raises(
        UnsupportedOpError, match=r"mlp\.onnx:\d+: ArrayFeatureExtractor = .*\n.* of the domain ai\.onnx\.ml"
    ):
        irongrad.onnx.load(file)
    model = irongrad.onnx.load(file, outputs=["probabilities"])
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach(), learned.predict_proba(x), rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = nn.functional.nll_loss(model(torch.from_numpy(x)).log(), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_sizes_may_vary_where_the_file_says_so(tmp_path: Path, export_model: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6, 3))
    batch = torch.export.Dim("batch")
    export_model(model, (torch.randn(5, 2, 8),), tmp_path / "m.onnx", dynamic_shapes=({0: batch},))
    read = irongrad.onnx.load(tmp_path / "m.onnx").eval()
    for size in (1, 3):
        x = torch.randn(size, 2, 8)
        torch.testing.assert_close(read(x), model.eval()(x))
    step = ig.TrainStep(
        model=read,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(read.parameters(), lr=0.1),
        inputs={"x": torch.randn(3, 2, 8), "y": torch.zeros(3, dtype=torch.long)},
        dynamic={"x": {0: "B"}, "y": {0: "B"}},
        buckets={"B": [4]},
    )
    assert capture(step).train.range_constraints


def test_tensors_of_a_size_that_varies_follow_the_batch() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        helper.make_node("Concat", ["rows", "three"], ["shape"], axis=0),
        helper.make_node("Expand", ["half", "shape"], ["expanded"]),
        helper.make_node("Tile", ["halves", "shape"], ["tiled"]),
        helper.make_node("Squeeze", ["rows"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["numbered"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["numbered", "column"], ["weights"]),
        helper.make_node("Sum", ["x", "expanded", "tiled"], ["sum"]),
        helper.make_node("Mul", ["sum", "weights"], ["y"]),
    ]
    arrays = {
        "three": np.array([3]),
        "half": np.array(0.5, np.float32),
        "halves": np.full((1, 1), 0.5, np.float32),
        "zero": np.array(0),
        "one": np.array(1),
        "column": np.array([-1, 1]),
    }
    model = from_proto(small(nodes, arrays, ["n", 3]))
    exported = torch.export.export(model, (torch.randn(5, 3),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for rows in (4, 7):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(exported.module()(x), (x + 1) * torch.arange(float(rows))[:, None])


def test_sizes_that_the_file_fixes_are_checked() -> None:
    model = from_proto(small([helper.make_node("Relu", ["x"], ["y"])], {}, [2, "n"]))
    model(torch.zeros(2, 7))
    with pytest.raises(UserError, match=r"'x' has shape \[3, 7\], and the ONNX file is made for \[2, \?\]"):
        model(torch.zeros(3, 7))


def test_weights_are_trained_and_statistics_and_constants_are_not() -> None:
    arrays = {
        "layer.weight": np.ones((3, 3), np.float32),
        "scale": np.ones(3, np.float32),
        "norm.mean": np.zeros(3, np.float32),
        "norm.var": np.ones(3, np.float32),
        "mask": np.array([0, -np.inf, 0], np.float32),
        "low": np.array(-1, np.float32),
        "shape": np.array([-1, 3]),
        "training": np.ones(3, np.float32),  # clashes with an attribute of nn.Module
    }
    nodes = [
        helper.make_node("MatMul", ["x", "layer.weight"], ["a"]),
        helper.make_node("BatchNormalization", ["a", "scale", "training", "norm.mean", "norm.var"], ["b"]),
        helper.make_node("Add", ["b", "mask"], ["c"]),
        helper.make_node("Clip", ["c", "low"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["y"]),
    ]
    model = from_proto(small(nodes, arrays, [4, 3]))
    assert [n for n, _ in model.named_parameters()] == ["scale", "training_", "layer.weight"]
    assert [n for n, _ in model.named_buffers()] == ["mask", "norm.mean", "norm.var"]
    frozen = from_proto(small(nodes, arrays, [4, 3]), freeze=["layer.*"])
    assert [n for n, _ in frozen.named_parameters()] == ["scale", "training_"]
    model.train()(torch.randn(4, 3))
    assert (model.get_buffer("norm.mean") != 0).any()
    before = model.eval().get_buffer("norm.mean").clone()
    model(torch.randn(4, 3))
    assert (model.get_buffer("norm.mean") == before).all()


class Kinds(nn.Module):
    """Parameters, buffers and constants in places where a file alone does not tell what is what."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.token, self.scale = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.rand(4) + 0.5)
        self.offset = torch.rand(4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.where(mask[:, None], self.token, self.linear(x))
        return h * self.table * self.scale.exp() + self.offset


def test_the_exporter_says_what_is_trained(tmp_path: Path, export_model: Callable[..., None]) -> None:
    """A mask token and a parameter of rank 0 are; buffers and constants are not."""
    model, x, mask = Kinds(), torch.randn(5, 3), torch.tensor([True, False, True, False, False])
    export_model(copy.deepcopy(model), (x, mask), tmp_path / "a.onnx")
    loaded = irongrad.onnx.load(tmp_path / "a.onnx")
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert {n for n, _ in loaded.named_buffers()} == {"table", "offset"}
    torch.testing.assert_close(loaded(x, mask), model(x, mask))
    frozen = irongrad.onnx.load(tmp_path / "a.onnx", freeze=["scale", "token"])
    assert {n for n, _ in frozen.named_parameters()} == {"linear.weight", "linear.bias"}


def test_what_the_exporter_computed_is_not_trained_and_is_named(
    tmp_path: Path, export_model: Callable[..., None]
) -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gain, self.table = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), torch.rand(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.gain * self.table

    export_model(Folded(), (torch.randn(5, 3),), tmp_path / "a.onnx", optimize=True)
    with pytest.warns(UserWarning, match="the exporter computed mul from other tensors, and it is not trained"):
        loaded = irongrad.onnx.load(tmp_path / "a.onnx")
    assert {n for n, _ in loaded.named_parameters()} == {"linear.weight", "linear.bias"}


def test_parameters_that_the_exporter_merged_are_refused(tmp_path: Path, export_model: Callable[..., None]) -> None:
    """Its optimizer keeps one of several equal tensors, such as those of fresh layers."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    export_model(copy.deepcopy(model), (torch.randn(5, 3),), tmp_path / "a.onnx", optimize=True)
    with pytest.raises(UserError, match=r"merged 1\.weight with p_3_weight, p_3_bias, which .* optimize=False"):
        irongrad.onnx.load(tmp_path / "a.onnx")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    export_model(copy.deepcopy(model), (torch.randn(5, 3),), tmp_path / "b.onnx", optimize=True)
    loaded = irongrad.onnx.load(tmp_path / "b.onnx")
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in model.named_parameters()}


def test_a_layer_on_products_of_parameters_is_none_that_the_exporter_merged(
    tmp_path: Path, export_model: Callable[..., None]
) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.first = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x * self.gain * self.gain)) @ self.first.weight

    export_model(Squared(), (torch.randn(5, 4),), tmp_path / "a.onnx", optimize=True)
    assert len(list(irongrad.onnx.load(tmp_path / "a.onnx").parameters())) == 4


class Fresh(nn.Module):
    """Layers with equal values, one that is tied to another, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.tied, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.tied.weight, self.copied = self.first.weight, copy.deepcopy(self.first)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.copied(self.tied(self.norm(self.first(x))))) * self.scale


@pytest.mark.parametrize("mode", ["EVAL", "TRAINING"])
def test_the_older_exporter_names_what_is_trained(mode: str, tmp_path: Path) -> None:
    """In evaluation mode it writes parameters of equal values as one; each is trained for itself, tied ones as one."""
    model, x = Fresh(), torch.randn(5, 4)
    options = {"dynamo": False, "training": getattr(torch.onnx.TrainingMode, mode), "do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates this exporter
        torch.onnx.export(copy.deepcopy(model), (x,), tmp_path / "a.onnx", **options)
    loaded = irongrad.onnx.load(tmp_path / "a.onnx")
    found, own = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert found.keys() == own.keys()
    model(x).square().mean().backward()
    loaded(x).square().mean().backward()
    for name, parameter in own.items():
        torch.testing.assert_close(found[name].grad, parameter.grad)


@pytest.mark.parametrize(("token", "trained"), [(np.ones((1, 3), np.float32), {"w", "t"}), (np.ones(1, "f"), {"w"})])
def test_a_mask_token_is_trained_and_a_fill_value_is_not(token: np.ndarray, trained: set[str]) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Greater", ["x", "x"], ["m"]),
        helper.make_node("Where", ["m", "t", "a"], ["y"]),
    ]
    model = from_proto(small(nodes, {"w": np.ones((3, 3), np.float32), "t": token}, [4, 3]))
    assert {n for n, _ in model.named_parameters()} == trained


def test_options_in_initialisers_are_known_without_data() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["a"]), helper.make_node("Resize", ["a", "", "scales"], ["y"])]
    arrays = {"w": np.ones((1, 1, 2, 3), np.float32), "scales": np.array([1, 1, 2, 3], np.float32)}
    model = from_proto(small(nodes, arrays, [1, 1, 2, 3]))
    assert [n for n, _ in model.named_parameters()] == ["w"]
    assert model(torch.ones(1, 1, 2, 3)).shape == (1, 1, 4, 9)


def test_an_option_may_be_computed_from_constants() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Concat", ["ones", "twos"], ["scales"], axis=0),
        helper.make_node("Resize", ["a", "", "scales"], ["y"]),
    ]
    arrays = {"w": np.ones((1, 1, 2, 3), np.float32), "ones": np.ones(2, np.float32), "twos": np.full(2, 2, np.float32)}
    model = from_proto(small(nodes, arrays, [1, 1, 2, 3]))
    assert [n for n, _ in model.named_parameters()] == ["w"]
    assert model(torch.ones(1, 1, 2, 3)).shape == (1, 1, 4, 6)


def test_a_mask_that_is_known_selects() -> None:
    nodes = [
        helper.make_node("NonZero", ["mask"], ["rows"]),
        helper.make_node("Squeeze", ["rows", "zero"], ["places"]),
        helper.make_node("Gather", ["x", "places"], ["y"]),
    ]
    arrays = {"mask": np.array([True, False, True]), "zero": np.array([0])}
    assert from_proto(small(nodes, arrays, [3]))(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 3.0]
    nodes[0].input[0] = "x"
    with pytest.raises(UnsupportedOpError, match="NonZero of opset 21 finds places, whose number depends on data"):
        from_proto(small(nodes, arrays, [3]))(torch.ones(3))


@pytest.mark.parametrize("start", [-1, -2, 2**63 - 1])
@pytest.mark.parametrize("end", [-(2**63), -3])
@pytest.mark.parametrize("step", [-1, -2])
def test_a_dimension_that_varies_is_read_backwards(start: int, end: int, step: int) -> None:
    nodes = [helper.make_node("Slice", ["x", "start", "end", "axis", "step"], ["y"])]
    arrays = {n: np.array([v]) for n, v in {"start": start, "end": end, "axis": 0, "step": step}.items()}
    model = from_proto(small(nodes, arrays, ["n", 2]))
    size = torch.export.Dim("n", min=4)
    exported = torch.export.export(model, (torch.randn(5, 2),), dynamic_shapes=({0: size},))
    for rows in (4, 7):
        x = torch.randn(rows, 2)
        expected = x.numpy()[max(start, -rows) : None if end < -rows else end : step]
        np.testing.assert_array_equal(exported.module()(x), expected)


def test_places_beyond_a_dimension_are_clamped_backwards() -> None:
    """The standard clamps a start to the last element, and an end to before the first one."""
    x = torch.arange(4.0)
    for start, end, expected in [
        (9, -9, [3, 2, 1, 0]),
        (2, 0, [2, 1]),
        (2, -4, [2, 1]),
        (-9, -(2**63), [0]),
        (1, 3, []),
    ]:
        nodes = [helper.make_node("Slice", ["x", "start", "end", "axis", "step"], ["y"])]
        arrays = {n: np.array([v]) for n, v in {"start": start, "end": end, "axis": 0, "step": -1}.items()}
        assert from_proto(small(nodes, arrays, [4]))(x).tolist() == expected


@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_images_of_a_batch_that_varies_are_resized(by: str) -> None:
    scales = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    rows = [
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=2),
        helper.make_node("Concat", ["rows", "plane"], ["sizes"], axis=0),
        helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear"),
    ]
    arrays = {"scales": np.array([1, 1, 2, 2], np.float32)} if by == "scales" else {"plane": np.array([6, 8])}
    model = from_proto(small([scales] if by == "scales" else rows, arrays, ["n", 2, 3, 4]))
    exported = torch.export.export(model, (torch.randn(5, 2, 3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for count in (2, 7):
        x = torch.randn(count, 2, 3, 4)
        torch.testing.assert_close(exported.module()(x), nn.functional.interpolate(x, scale_factor=2, mode="bilinear"))


def test_known_maxima_broadcast() -> None:
    nodes = [
        helper.make_node("Max", ["rows", "columns"], ["most"]),
        helper.make_node("Gather", ["x", "most"], ["y"], axis=0),
    ]
    model = from_proto(small(nodes, {"rows": np.array([[0], [2]]), "columns": np.array([1, 0])}, [3]))
    assert model(torch.tensor([0.0, 1.0, 2.0])).tolist() == [[1.0, 0.0], [2.0, 2.0]]


def test_class_weights_are_not_trained() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["a", "labels", "weights"], ["y"]),
    ]
    arrays = {"w": np.ones((3, 2), np.float32), "weights": np.array([1, 3], np.float32), "labels": np.array([0, 1])}
    assert [n for n, _ in from_proto(small(nodes, arrays, [2, 3])).named_parameters()] == ["w"]


def test_inputs_whose_names_are_one_in_python() -> None:
    assert arguments_of(["x.1", "x_1", "x-1", "x_1_2", "self"]) == {
        "x.1": "x_1_3",
        "x_1": "x_1",
        "x-1": "x_1_4",
        "x_1_2": "x_1_2",
        "self": "_self",
    }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float16])
def test_data_that_the_files_type_holds_is_converted(dtype: torch.dtype) -> None:
    model = from_proto(small([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((2, 2), np.float32)}, [2]))
    assert model(torch.ones(2, dtype=dtype)).tolist() == [2.0, 2.0]
    assert model.double()(torch.ones(2, dtype=dtype)).dtype is torch.float64


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_without_running_statistics_takes_those_of_the_batch(
    training: bool, tmp_path: Path, export_model: Callable[..., None]
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)), torch.randn(6, 3)
    export_model(copy.deepcopy(model), (x,), tmp_path / "a.onnx")
    loaded = irongrad.onnx.load(tmp_path / "a.onnx").train(training)
    assert not list(loaded.buffers())
    direction = torch.randn(6, 4)
    model(x).backward(direction)
    loaded(x).backward(direction)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_an_input_may_be_called_self() -> None:
    model = small([helper.make_node("Relu", ["self"], ["y"])], {}, [2])
    model.graph.input[0].name = "self"
    assert from_proto(model)(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_size_that_the_file_fixes_does_not_vary() -> None:
    read = from_proto(
        small([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((3, 4), np.float32)}, [4, 3])
    )
    step = ig.TrainStep(
        model=read,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(read.parameters(), lr=0.1),
        inputs={"x": torch.randn(4, 3), "y": torch.zeros(4, dtype=torch.long)},
        dynamic={"x": {0: "B"}, "y": {0: "B"}},
    )
    with pytest.raises(UserError, match="dimension 0 of the input 'x' varies, and the ONNX file is made for 4"):
        capture(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_type_that_would_lose_values_is_refused(dtype: torch.dtype) -> None:
    model = from_proto(small([helper.make_node("Relu", ["x"], ["y"])], {}, [3]))
    model.inputs["x"] = replace(model.inputs["x"], dtype=torch.bool)
    with pytest.raises(UserError, match=f"'x' is {str(dtype)[6:]}, and the ONNX file is made for bool"):
        model(torch.ones(3, dtype=dtype))


def test_dropout_drops_in_training_mode_only() -> None:
    model = from_proto(small([helper.make_node("Dropout", ["x"], ["y"])], {}, [100]))
    x = torch.ones(100)
    assert (model.eval()(x) == 1).all()
    assert set(model.train()(x).tolist()) == {0.0, 2.0}


def test_an_unsupported_operator_is_named_with_its_node() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Unique", ["a"], ["y"], name="kinds")]
    with pytest.raises(UnsupportedOpError, match=r"net\.onnx:2: kinds = Unique\(a\)\n  Unique of opset 17 has no"):
        from_proto(small(nodes, {}, [3], opset=17), "net.onnx")


def test_an_error_in_a_step_names_the_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        helper.make_node("Reshape", ["a", "shape"], ["y"], name="flatten"),
    ]
    arrays = {"w": np.ones((3, 2), np.float32), "shape": np.array([7])}
    onnx.save(small(nodes, arrays, ["n", 3]), tmp_path / "net.onnx")
    model = irongrad.onnx.load(tmp_path / "net.onnx")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model=model, loss=lambda y: y.sum(), optimizer=optimizer, inputs={"x": torch.ones(4, 3)})
    with pytest.raises(CaptureError, match=r"net\.onnx:2: flatten = Reshape\(a, shape\)\n"):
        capture(step)


def test_a_shape_that_depends_on_data_is_refused() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["n"], to=7), helper.make_node("Expand", ["one", "n"], ["y"])]
    model = from_proto(small(nodes, {"one": np.ones(1, np.float32)}, [1]))
    with pytest.raises(UnsupportedOpError, match="Expand of opset 21 takes a shape that depends on data"):
        model(torch.ones(1))


def test_an_unreadable_file_and_an_unknown_output_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot be read as an ONNX file"):
        irongrad.onnx.load(tmp_path / "a.onnx")
    with pytest.raises(UserError, match="has no output 'z'; it has y"):
        from_proto(small([helper.make_node("Relu", ["x"], ["y"])], {}, [3]), outputs=["z"])


@pytest.mark.parametrize(("kind", "directions"), [("LSTM", 1), ("LSTM", 2), ("GRU", 1), ("GRU", 2), ("RNN", 2)])
def test_recurrent_layers_have_pytorchs_gradients(kind: str, directions: int, tmp_path: Path) -> None:
    """Compared with a layer of `torch.nn` that has the same weights; ONNX orders the gates differently."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(3, 4, bidirectional=directions == 2).double()
    order = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}[kind]

    def stacked(name: str) -> np.ndarray:
        ends = ["", "_reverse"][:directions]
        parts = [getattr(layer, f"{name}_l0{end}").detach().chunk(len(order)) for end in ends]
        return np.stack([torch.cat([p[i] for i in order]).numpy() for p in parts])

    arrays = {"w": stacked("weight_ih"), "r": stacked("weight_hh")}
    arrays["b"] = np.concatenate([stacked("bias_ih"), stacked("bias_hh")], 1)
    direction = "bidirectional" if directions == 2 else "forward"
    options = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = helper.make_node(kind, ["x", "w", "r", "b"], ["y"], hidden_size=4, direction=direction, **options)
    model = from_proto(small([node], arrays, [5, 2, 3]))
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    mine, theirs = model(x), layer(x)[0]
    torch.testing.assert_close(mine.transpose(1, 2).flatten(2), theirs)
    (mine**2).sum().backward()
    (theirs**2).sum().backward()
    expected = np.stack(
        [
            torch.cat([getattr(layer, f"weight_hh_l0{end}").grad.chunk(len(order))[i] for i in order]).numpy()
            for end in ["", "_reverse"][:directions]
        ]
    )
    np.testing.assert_allclose(model.get_parameter("r").grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_reversed_layer_is_the_layer_on_the_reversed_sequence(kind: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(1, 4 * gates, 3)), "r": rng.normal(size=(1, 4 * gates, 4))}
    options = {"hidden_size": 4} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    forward, backward = (
        from_proto(small([helper.make_node(kind, ["x", "w", "r"], ["y"], direction=d, **options)], arrays, [5, 2, 3]))
        for d in ("forward", "reverse")
    )
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(backward(x), forward(x.flip(0)).flip(0))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_recurrent_layer_is_captured_as_a_loop(direction: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(0, 0.3, size=(1, 16, k)).astype(np.float32) for n, k in (("w", 3), ("r", 4))}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4, direction=direction)
    model = from_proto(small([node], arrays, [100, 2, 3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(
        model=model, loss=lambda y: (y**2).mean(), optimizer=optimizer, inputs={"x": torch.ones(100, 2, 3)}
    )
    assert sum("recurrent" in str(n.target) for n in capture(step).train.graph.nodes) == 1
