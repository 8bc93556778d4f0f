"""Models and losses that can be captured: their outputs, inputs, state and modes, compiled and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.pipeline.package import Artifact
from irongrad.runtime import Session
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import Role

Compile = Callable[..., Artifact]
ENTRIES = ("train_step", "eval_step", "predict")


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def batch(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    return {"x": x, **more, "y": y}


def arrays(step: ig.TrainStep, *names: str) -> dict[str, np.ndarray]:
    return {n: t.numpy() for n, t in step.inputs.items() if not names or n in names}


def check_predict(session: Session, step: ig.TrainStep, expected: dict[str, torch.Tensor], *names: str) -> None:
    found = session.predict(**arrays(step, *names))
    found = found if isinstance(found, dict) else {"output": found}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.detach().numpy(), rtol=1e-5, atol=1e-6)


# --- state --------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Two BatchNorms, one frozen in eval mode; buffers of every dtype, updated in every way; a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm, self.still = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.still.eval()
        self.still.running_mean.fill_(0.25)
        self.last.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("assigned", torch.ones(8))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("mask", torch.arange(8) % 3 != 0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bytes", torch.arange(8, dtype=torch.uint8) + 250)
        self.register_buffer("scratch", torch.zeros(8, dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.still(self.norm(self.first(x)))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.assigned = 0.5 * self.assigned + hidden.detach().amax(0)
            self.seen |= hidden.detach().amax(0) > 1
            self.calls += 1
            self.bytes += 1
            self.scratch[1:3] = 7
        scale = torch.tensor([0.5, 1.0, 2.0, 1.0]) + torch.arange(4) + torch.tensor(1)
        hidden = torch.where(self.mask & ~self.seen, hidden, 0.1 * hidden) + self.mean + 0.1 * self.assigned
        return self.last(hidden + self.bytes.float() / 255 + self.scratch) * scale


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> tuple[ig.TrainStep, Session]:
    torch.manual_seed(0)
    model = Stateful()
    step = ig.TrainStep(model, cross_entropy, sgd(model), batch())
    return step, ig.compile(step, tmp_path_factory.mktemp("stateful") / "artifact", entry_points=ENTRIES).load()


def test_state_of_every_kind(stateful: tuple[ig.TrainStep, Session]) -> None:
    step, session = stateful
    before = session.state()
    for name, tensor in step.model.state_dict().items():
        np.testing.assert_array_equal(before[name], tensor.numpy(), err_msg=name)  # compiling changed nothing
    dtypes = {s.name: s.dtype for s in session.manifest.state}
    kinds = ("seen", "calls", "bytes", "scratch")
    assert [dtypes[n] for n in kinds] == ["bool", "int64", "uint8", "int32"]
    session.train_step(**arrays(step))
    after = session.state()
    changed = {n for n in before if (before[n] != after[n]).any()}
    assert {"norm.running_mean", "norm.running_var", "mean", "assigned", "seen", "bytes"} <= changed
    assert not changed & {"still.running_mean", "still.num_batches_tracked", "last.bias", "mask"}
    assert (after["norm.num_batches_tracked"], after["calls"]) == (1, 1)
    assert after["bytes"].tolist() == [251, 252, 253, 254, 255, 0, 1, 2]
    session.load_state(before)


def test_evaluation_leaves_running_statistics(stateful: tuple[ig.TrainStep, Session]) -> None:
    step, session = stateful
    before = session.state()
    session.eval_step(**arrays(step))
    session.predict(x=arrays(step)["x"])
    assert all((before[n] == a).all() for n, a in session.state().items())


def test_frozen_parameter_has_no_gradient(stateful: tuple[ig.TrainStep, Session]) -> None:
    _, session = stateful
    assert "last.weight" in session.manifest.gradients
    assert "last.bias" not in session.manifest.gradients


def test_capture_keeps_modes(stateful: tuple[ig.TrainStep, Session]) -> None:
    step, _ = stateful
    assert step.model.training
    assert not step.model.still.training
    assert isinstance(step.model.assigned, torch.Tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 5), nn.Linear(5, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def test_tied_weights(compiled: Compile) -> None:
    torch.manual_seed(0)
    model = Tied()
    inputs = {"tokens": torch.randint(0, 10, (8,)), "y": torch.randint(0, 10, (8,))}
    artifact = compiled(ig.TrainStep(model, cross_entropy, torch.optim.Adam(model.parameters()), inputs), "train_step")
    assert artifact.manifest.gradients == ("embed.weight",)
    aliases = {s.name: s.aliases for s in artifact.manifest.state if s.role is Role.PARAMETER}
    assert aliases == {"embed.weight": ("head.weight",)}


class WeightedLoss(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(output * self.scale, y)


def test_loss_with_state(compiled: Compile) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(6, 4), WeightedLoss()
    artifact = compiled(ig.TrainStep(model, loss, sgd(model, loss), batch()), *ENTRIES, "train_steps")
    assert artifact.manifest.gradients == ("weight", "bias", "loss.scale")
    assert {s.name: s.role for s in artifact.manifest.state}["loss.calls"] is Role.BUFFER


def test_loss_that_penalises_the_model(compiled: Compile) -> None:
    model = nn.Linear(6, 4)

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    compiled(ig.TrainStep(model, loss, sgd(model), batch()), "train_step")


# --- inputs and outputs -------------------------------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)


class ManyInputs(Logits):
    """Inputs of every dtype, by keyword, also of rank 0; several outputs, nested and of every dtype."""

    def forward(self, x: torch.Tensor, *, keep: torch.Tensor, pixels: torch.Tensor, shift: torch.Tensor, scale=None):
        h = self.layer(torch.where(keep, x, 0.0)) * (pixels.float() / 255)[:, None] * scale + shift[:, None]
        return {"logits": h, "more": (h.argmax(-1), h > 0), "count": 3, "none": None}


def test_inputs_and_outputs_of_every_dtype(compiled: Compile) -> None:
    torch.manual_seed(0)
    model = ManyInputs()
    inputs = batch(
        keep=torch.rand(16, 6) > 0.5,
        pixels=torch.randint(0, 256, (16,), dtype=torch.uint8),
        shift=torch.randint(-5, 5, (16,), dtype=torch.int32),
        scale=torch.tensor(1.5),
    )
    step = ig.TrainStep(model, lambda o, y: cross_entropy(o["logits"], y), sgd(model), inputs)
    artifact = compiled(step)
    train = artifact.manifest.entry_point("train_step")
    assert [s.dtype for s in train.inputs] == ["float32", "bool", "uint8", "int32", "float32", "int64"]
    model.eval()
    taken = [n for n in inputs if n != "y"]
    output = model(**{n: inputs[n] for n in taken})
    expected = {"logits": output["logits"], "more.0": output["more"][0], "more.1": output["more"][1]}
    check_predict(artifact.load(), step, expected, *taken)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Named(NamedTuple):
    logits: torch.Tensor
    features: torch.Tensor


class ReturnsDataclass(Logits):
    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x))


class ReturnsNamedTuple(Logits):
    def forward(self, x: torch.Tensor) -> Named:
        return Named(self.layer(x), x.tanh())


class ReturnsPair(Logits):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.layer(x), [x.sum(1)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ReturnsDataclass, ("logits",)),
        (ReturnsNamedTuple, ("logits", "features")),
        (ReturnsPair, ("output0", "output1.0")),
    ],
)
def test_output_names(kind: type[nn.Module], names: tuple[str, ...]) -> None:
    def loss(output: object, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output[0] if isinstance(output, tuple) else output.logits, y)

    model = kind()
    assert capture(ig.TrainStep(model, loss, sgd(model), batch())).output_names == names


class ItsOwnLoss(Logits):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.layer(x)
        return Output(logits, cross_entropy(logits, labels))


def test_model_with_its_own_loss_predicts_without_labels(compiled: Compile) -> None:
    torch.manual_seed(0)
    model = ItsOwnLoss()
    inputs = batch()
    step = ig.TrainStep(model, None, sgd(model), {"x": inputs["x"], "labels": inputs["y"]})
    artifact = compiled(step, *ENTRIES)
    assert [s.name for s in artifact.manifest.entry_point("predict").inputs] == ["x"]
    check_predict(artifact.load(), step, {"output": model.layer(inputs["x"])}, "x")


class ReturnsLoss(Logits):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.layer(x), y)


def test_model_that_returns_its_loss() -> None:
    model = ReturnsLoss()
    captured = capture(ig.TrainStep(model, None, sgd(model), batch()))
    assert captured.call.keyword == ("x", "y")
    assert captured.output_names == ("output",)


def test_model_inputs_can_be_named() -> None:
    model = nn.Bilinear(6, 6, 4)
    inputs = {"a": torch.randn(8, 6), "y": torch.randint(0, 4, (8,)), "b": torch.randn(8, 6)}
    captured = capture(ig.TrainStep(model, cross_entropy, sgd(model), inputs, model_inputs=["b", "a"]))
    assert captured.call.positional == ("b", "a")
    assert captured.call.targets == ("y",)


def test_eval_mode_model_is_captured_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    captured = capture(ig.TrainStep(model, cross_entropy, sgd(model), batch()))
    assert captured.train.graph_signature.buffers_to_mutate or "add_" in str(captured.train.graph)
    assert not model.training


# --- Hugging Face -------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor], tuple[str, ...]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    ids, mask = torch.randint(0, 50, (4, 8)), torch.ones(4, 8, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (4,))}
    return BertForSequenceClassification(config), inputs, ("input_ids", "attention_mask")


def llama() -> tuple[nn.Module, dict[str, torch.Tensor], tuple[str, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**TINY, num_key_value_heads=1, use_cache=False)
    ids = torch.randint(0, 50, (2, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, ("input_ids",)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, llama])
def test_hugging_face_model(make: Callable[..., tuple], compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model, inputs, taken = make()
    step = ig.TrainStep(model, None, torch.optim.AdamW(model.parameters(), lr=1e-3), inputs)
    artifact = compiled(step, *ENTRIES)
    labels = next(s for s in artifact.manifest.entry_point("train_step").inputs if s.name == "labels")
    assert labels.exempt == -100
    model.eval()
    check_predict(artifact.load(), step, {"output": model(**{n: inputs[n] for n in taken}).logits}, *taken)


def test_nothing_is_written_where_capture_fails(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    with pytest.raises(CaptureError):
        ig.compile(ig.TrainStep(model, lambda o, y: o, sgd(model), batch()), tmp_path / "artifact")
    assert not list(tmp_path.iterdir())


class TrainsOnly(Logits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training, "there is nothing to evaluate"
        return self.layer(x)


@pytest.mark.parametrize("stage", ["capture", "optimizer"])
def test_evaluation_is_captured_only_for_an_entry_point_that_runs_it(stage: str, tmp_path: Path) -> None:
    model = TrainsOnly()
    step = ig.TrainStep(model, cross_entropy, sgd(model), batch())
    build(step, make_options(tmp_path / "out", entry_points=("train_step",), stop_after=stage))
    with pytest.raises(CaptureError, match="nothing to evaluate"):
        build(step, make_options(tmp_path / "out", entry_points=("train_step", "eval_step"), stop_after=stage))
