"""`irongrad export`: what PyTorch and transformers load has the trained values, and nothing is lost in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import irongrad as ig
from irongrad.export.layouts import export
from irongrad.runtime import Session, load
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest_file import read_manifest
from irongrad.step.layouts import layouts_of


class Tied(nn.Module):
    """A tied weight, BatchNorm, a buffer that is no part of a state dict, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.embedding(x)) * self.scale))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=50, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return BertForSequenceClassification(config)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def compiled(model: nn.Module, inputs: Mapping[str, torch.Tensor], loss: Any, folder: Path, **options: Any) -> Path:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return ig.compile(ig.TrainStep(model, loss, optimizer, inputs), folder, **options).directory


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "net"
    inputs = {"x": torch.arange(6), "y": torch.arange(6)}
    return compiled(Tied(), inputs, nn.functional.cross_entropy, folder)


@pytest.fixture(scope="module")
def checkpoint(tied: Path) -> Path:
    with load(tied) as session:
        for shift in range(3):
            session.train_step(x=np.arange(6), y=np.arange(6) + shift)
        session.save(tied.parent / "net.safetensors")
    return tied.parent / "net.safetensors"


def test_a_state_dict_loads_strictly_and_predicts_the_same(tied: Path, checkpoint: Path, tmp_path: Path) -> None:
    (file,) = export(tied, "torch", tmp_path / "model.safetensors", checkpoint)
    loaded = load_file(file)
    assert {"embedding.weight", "head.weight"} <= loaded.keys()
    model = Tied()
    model.load_state_dict(loaded)
    with load(tied, checkpoint=checkpoint) as session, torch.no_grad():
        expected = session.predict(x=np.arange(6))
        np.testing.assert_allclose(model.eval()(torch.arange(6)).numpy(), expected, atol=1e-5)
        for name, tensor in loaded.items():
            np.testing.assert_array_equal(tensor.numpy(), session.state()[name])


def test_without_a_checkpoint_the_model_is_the_one_that_was_compiled(tied: Path, tmp_path: Path) -> None:
    (file,) = export(tied, "torch", tmp_path / "model.safetensors")
    for name, tensor in Tied().state_dict().items():
        assert torch.equal(load_file(file)[name], tensor), name


@pytest.mark.parametrize("make", [Tied, bert, gpt2, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))])
def test_the_recorded_names_are_those_of_the_state_dict(make: Any) -> None:
    model = make()
    assert set(layouts_of(model)["torch"].tensors) == set(model.state_dict())


def test_the_command_needs_no_torch(tied: Path, checkpoint: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from irongrad.cli.main import main; main()"
    arguments = [tied, "--to", "torch", "-o", tmp_path / "m.safetensors", "--checkpoint", checkpoint, "--json"]
    command = [sys.executable, "-c", program, "export", *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (file,) = json.loads(printed)["files"]
    assert file == {"path": str(tmp_path / "m.safetensors"), "bytes": (tmp_path / "m.safetensors").stat().st_size}


def squared(outputs: Any) -> torch.Tensor:
    return getattr(outputs, "logits", outputs).square().mean()


class Wrapped(nn.Module):
    """A transformers model inside a module, with or without a part of its own that is trained."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = bert(), head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(input_ids=input_ids).logits)


@pytest.mark.parametrize("make", [bert, gpt2, lambda: Wrapped(nn.Identity())], ids=["bert", "gpt2", "wrapped"])
def test_transformers_loads_the_exported_folder(make: Any, tmp_path: Path) -> None:
    model = make().eval()
    inner = model.inner if isinstance(model, Wrapped) else model
    inputs = {"input_ids": torch.arange(8).reshape(2, 4)}
    entries = ("train_step", "predict", "export_state")
    folder = compiled(model, inputs, squared, tmp_path / "net", entry_points=entries)
    with load(folder) as session:
        for _ in range(3):
            session.train_step(input_ids=inputs["input_ids"].numpy())
        session.save(tmp_path / "net.safetensors")
        expected = predicted(session, inputs["input_ids"].numpy())
    export(folder, "huggingface", tmp_path / "out", tmp_path / "net.safetensors")
    loaded, about = type(inner).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(about.values()), about
    with torch.no_grad():
        np.testing.assert_allclose(loaded.eval()(**inputs).logits.numpy(), expected, atol=1e-5)
    theirs = type(inner).config_class.from_pretrained(tmp_path / "out").to_dict()
    inner.save_pretrained(tmp_path / "theirs")
    assert theirs == type(inner).config_class.from_pretrained(tmp_path / "theirs").to_dict()


def predicted(session: Session, input_ids: np.ndarray) -> np.ndarray:
    found = session.predict(input_ids=input_ids)
    return found if isinstance(found, np.ndarray) else found["logits"]


def test_a_form_that_would_lose_trained_tensors_is_refused(tmp_path: Path) -> None:
    inputs = {"input_ids": torch.arange(8).reshape(2, 4)}
    folder = compiled(Wrapped(nn.Linear(3, 2)), inputs, torch.mean, tmp_path / "net", entry_points=["train_step"])
    with pytest.raises(UserError, match=r"would lose head\.weight, head\.bias, which training changes; --to torch"):
        export(folder, "huggingface", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_form_that_the_model_lacks_is_refused(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--to peft needs one active adapter of PEFT.*the forms it has: torch"):
        export(tied, "peft", tmp_path / "out")
    with load(tied) as session, pytest.raises(ArtifactError, match="this artifact's model has none"):
        session.load_adapter(tmp_path)


def test_another_configuration_is_another_entry_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is no part of the graphs."""
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path / "cache"))
    inputs = {"input_ids": torch.arange(8).reshape(2, 4)}
    for name in ("first", "second", "first"):
        model = bert()
        model.config.id2label = {number: f"{name} {number}" for number in range(3)}
        folder = compiled(model, inputs, squared, tmp_path / "net", entry_points=["train_step"])
        assert read_manifest(folder).layouts["huggingface"].config["id2label"]["0"] == f"{name} 0"


def plain_module_with_lora(seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))


@pytest.mark.parametrize("base", [None, "base.irpa"])
def test_an_artifact_that_only_predicts_takes_an_adapter_that_peft_wrote(tmp_path: Path, base: str | None) -> None:
    """The base is no transformers model, so PEFT's configuration names its class."""
    entries = ["predict", "export_state", "import_state"]
    inputs = {"x": torch.ones(3, 4)}
    options = {"entry_points": entries} | ({"base": tmp_path / base} if base else {})
    folder = compiled(plain_module_with_lora(), inputs, torch.mean, tmp_path / "net", **options)
    other = plain_module_with_lora(seed=1).eval()
    other.save_pretrained(tmp_path / "other")
    theirs = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    assert read_manifest(folder).layouts["peft"].config == theirs
    with load(folder) as session, torch.no_grad():
        before = session.predict(x=inputs["x"].numpy())
        session.load_adapter(tmp_path / "other")
        after = session.predict(x=inputs["x"].numpy())
        np.testing.assert_allclose(after, other(inputs["x"]).numpy(), atol=1e-5)
        assert np.abs(after - before).max() > 1e-3
