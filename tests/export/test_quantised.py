"""`irongrad export` over a quantised base: each form predicts what the artifact predicts, or is refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import irongrad as ig
from irongrad.export.layouts import export
from irongrad.frontends.export_inference import export_inference
from irongrad.frontends.export_onnx import export_onnx
from irongrad.frontends.trained_step import TrainedStep
from irongrad.runtime import load
from irongrad.runtime.errors import UserError
from irongrad.step.layouts import layouts_of
from tests.export.test_layouts import bert, compiled, squared

FORMS: dict[str, Mapping[str, Any]] = {"int8": {}, "int4": {"group": 8}, "bf16": {}}
IDS = torch.arange(12).reshape(6, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids).mean(1))))


def base_of(form: str) -> Net:
    return ig.quantize(Net().requires_grad_(requires_grad=False), form, **FORMS[form])


def make_step(form: str) -> ig.TrainStep:
    model = get_peft_model(base_of(form), LoraConfig(r=2, target_modules=["hidden", "head"], init_lora_weights=False))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    inputs = {"ids": IDS, "labels": torch.arange(6) % 4}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)


class Trained:
    """An artifact over a base of a form, the state after three steps, and what it predicts with that."""

    def __init__(self, form: str, folder: Path) -> None:
        self.form, self.checkpoint = form, folder / "net.safetensors"
        entries = ["train_step", "predict", "export_state"]
        self.artifact = ig.compile(make_step(form), folder / "net", entry_points=entries).directory
        with load(self.artifact) as session:
            for _ in range(3):
                session.train_step(ids=IDS.numpy(), labels=np.arange(6) % 4)
            session.save(self.checkpoint)
            self.expected = session.predict(ids=IDS.numpy())

    def step(self, *, merge: bool = False) -> TrainedStep:
        return TrainedStep(make_step(self.form), "net.py", self.artifact, self.checkpoint, merge)


@pytest.fixture(scope="module", params=["int4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("int8", "bf16"))])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp(request.param))


def assert_predicts(model: nn.Module, expected: np.ndarray) -> None:
    with torch.no_grad():
        np.testing.assert_allclose(model.eval()(IDS).numpy(), expected, rtol=0, atol=1e-5)


def test_pytorch_loads_the_state_dict_into_the_quantised_model(trained: Trained, tmp_path: Path) -> None:
    export(trained.artifact, "torch", tmp_path / "model.safetensors", trained.checkpoint)
    model = make_step(trained.form).model
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_predicts(model, trained.expected)


def test_peft_loads_the_adapter_over_the_quantised_base(trained: Trained, tmp_path: Path) -> None:
    export(trained.artifact, "peft", tmp_path / "adapter", trained.checkpoint)
    assert_predicts(PeftModel.from_pretrained(base_of(trained.form), tmp_path / "adapter"), trained.expected)


def test_an_artifact_that_predicts_alone(trained: Trained, tmp_path: Path) -> None:
    assert export_inference(trained.step(), tmp_path / "predict")
    with load(tmp_path / "predict") as session:
        np.testing.assert_allclose(session.predict(ids=IDS.numpy()), trained.expected, rtol=0, atol=1e-5)


def test_onnx_runtime_predicts_the_same(trained: Trained, tmp_path: Path) -> None:
    export_onnx(trained.step(), tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: IDS.numpy()})
    np.testing.assert_allclose(found, trained.expected, rtol=0, atol=1e-5)


def test_an_adapter_is_not_merged_into_fewer_bits(trained: Trained, tmp_path: Path) -> None:
    for to in (export_inference, export_onnx):
        with pytest.raises(UserError, match=r"PEFT cannot merge the adapter of the model: .* is quantised\. Leave"):
            to(trained.step(merge=True), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_transformers_cannot_read_a_quantised_model(tmp_path: Path) -> None:
    model = ig.quantize(bert(), "int8")
    assert "huggingface" not in layouts_of(model)
    inputs = {"input_ids": torch.arange(8).reshape(2, 4)}
    head = nn.Linear(3, 2)
    folder = compiled(nn.Sequential(Logits(model), head), inputs, squared, tmp_path / "net", entry_points=["predict"])
    with pytest.raises(UserError, match="needs one transformers model, without an adapter of PEFT in it and not quant"):
        export(folder, "huggingface", tmp_path / "out")


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits
