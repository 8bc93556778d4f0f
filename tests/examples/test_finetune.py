"""MiniLM with an adapter of PEFT: trained without torch as eager trains it, taken out, and put in again."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file

import irongrad as ig
from irongrad.runtime import Session, load
from irongrad.runtime.adapters import CONFIG, WEIGHTS
from irongrad.runtime.errors import ArtifactError

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH, BATCH = 16, 4

# PEFT 0.21 asks transformers 5.24 for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def minilm() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES / "finetune")
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("minilm")


@pytest.fixture(scope="module")
def base(minilm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minilm.news.base(tmp_path_factory.mktemp("base") / "minilm")


@pytest.fixture(scope="module")
def step(minilm: ModuleType, base: Path) -> ig.TrainStep:
    return minilm.make_step(BATCH, LENGTH, layers=1, folder=base)


@pytest.fixture(scope="module")
def artifact(step: ig.TrainStep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of MiniLM, in short texts."""
    return ig.compile(step, tmp_path_factory.mktemp("finetune") / "news").directory


@pytest.fixture(scope="module")
def batches(minilm: ModuleType, base: Path) -> list[dict[str, np.ndarray]]:
    train, _ = minilm.news.tokens(LENGTH, base)
    order = np.random.default_rng(0).permutation(len(train["labels"]))[: 6 * BATCH].reshape(6, BATCH)
    return [{name: array[rows] for name, array in train.items()} for rows in order]


@pytest.fixture(scope="module")
def trained(artifact: Path, batches: list[dict[str, np.ndarray]]) -> Path:
    """A checkpoint after a few steps in a process without torch, and the adapter that `irongrad export` writes."""
    place = artifact.parent
    np.savez(place / "batches.npz", **{n: np.concatenate([b[n] for b in batches]) for n in batches[0]})
    checkpoint, adapter = place / "news.safetensors", place / "adapter"
    data = ["--data", place / "batches.npz", "--lr", 0.01]
    without_torch("train", artifact, *data, "--checkpoint", checkpoint)
    without_torch("export", artifact, "--to", "peft", "-o", adapter, "--checkpoint", checkpoint)
    return place


def without_torch(*arguments: object) -> None:
    """Run `irongrad` in a process that cannot import torch, transformers or PEFT."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'peft'])\n"
        "from irongrad.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def logits(session: Session, batch: dict[str, np.ndarray]) -> np.ndarray:
    found = session.predict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return found if isinstance(found, np.ndarray) else found["logits"]


def eager_logits(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> np.ndarray:
    inputs = {n: torch.from_numpy(batch[n]) for n in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**inputs).logits.numpy()


def eagerly(step: ig.TrainStep, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the step in eager PyTorch and PEFT: `train_step` trains it on one batch, and returns the loss."""
    from training import Eager

    class Adapted(Eager):
        def train_step(self, between: Any = None, **batch: np.ndarray) -> float:
            tensors = {n: torch.from_numpy(a) for n, a in batch.items()}
            outputs = self.model.train()(tensors["input_ids"], tensors["attention_mask"])
            loss = self._step.loss(outputs, tensors["labels"])
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._step.clip_grad_norm)
            self._optimizer.step()
            return loss.item()

    return Adapted(step, dtype)


def eager_losses(step: ig.TrainStep, batches: list[dict[str, np.ndarray]], dtype: torch.dtype) -> list[float]:
    twin = eagerly(step, dtype)
    return [twin.train_step(**batch) for batch in batches]


def test_the_adapter_trains_as_eager_does(
    artifact: Path,
    step: ig.TrainStep,
    batches: list[dict[str, np.ndarray]],
    check_losses: Callable[..., None],
) -> None:
    with load(artifact) as session:
        losses = [session.train_step(**batch) for batch in batches]
    check_losses(losses, lambda dtype: eager_losses(step, batches, dtype))


def test_peft_loads_the_exported_adapter_with_equal_predictions(
    minilm: ModuleType, base: Path, artifact: Path, trained: Path, batches: list[dict[str, np.ndarray]]
) -> None:
    with load(artifact, checkpoint=trained / "news.safetensors") as session:
        expected = logits(session, batches[0])
        before = logits(load(artifact), batches[0])
    model = PeftModel.from_pretrained(minilm.classifier(base, layers=1), trained / "adapter")
    np.testing.assert_allclose(eager_logits(model, batches[0]), expected, atol=1e-5)
    assert np.abs(expected - before).max() > 1e-2  # training changed something
    assert sum(f.stat().st_size for f in (trained / "adapter").iterdir()) < artifact_size(artifact) / 100


def artifact_size(artifact: Path) -> int:
    return sum(f.stat().st_size for f in artifact.iterdir())


def test_peft_itself_writes_the_same_adapter(minilm: ModuleType, base: Path, trained: Path, tmp_path: Path) -> None:
    model = PeftModel.from_pretrained(minilm.classifier(base, layers=1), trained / "adapter", is_trainable=True)
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(folder / WEIGHTS) for folder in (trained / "adapter", tmp_path / "again"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    ours, theirs = (json.loads((folder / CONFIG).read_text()) for folder in (trained / "adapter", tmp_path / "again"))
    assert {k: as_set(v) for k, v in ours.items()} == {k: as_set(v) for k, v in theirs.items()}


def as_set(value: Any) -> Any:
    """A list without its order: PEFT writes sets, and names the modules that it saves twice after it has read them."""
    return set(value) if isinstance(value, list) else value


def test_adapters_are_swapped_in_a_running_session(
    artifact: Path, trained: Path, batches: list[dict[str, np.ndarray]]
) -> None:
    with load(artifact, checkpoint=trained / "news.safetensors") as session:
        expected, state = logits(session, batches[0]), session.state()
    with load(artifact) as session:
        before = logits(session, batches[0])
        session.load_adapter(trained / "adapter")
        np.testing.assert_array_equal(logits(session, batches[0]), expected)
        session.train_step(**batches[1])
        assert np.abs(logits(session, batches[0]) - expected).max() > 0
        session.load_adapter(trained / "adapter", absent="reset")
        np.testing.assert_array_equal(logits(session, batches[0]), expected)
        for name, array in session.state().items():
            where = state if name in session.manifest.layouts["peft"].tensors.values() else session.initial_state()
            np.testing.assert_array_equal(array, where[name], err_msg=name)
        session.reset()
        np.testing.assert_array_equal(logits(session, batches[0]), before)


def changed_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | settings))


def changed_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object], about: Any = None) -> None:
    arrays = load_file(folder / WEIGHTS)
    change(arrays)
    save_file(arrays, folder / WEIGHTS, metadata=about)


NAME = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.weight"
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another base by its hash": (
        lambda f: changed_weights(f, lambda _: None, {"irongrad": json.dumps({"base": "0123"})}),
        "was trained on another base: its frozen tensors have the sha256 0123",
    ),
    "another base by its name": (
        lambda f: (changed_weights(f, lambda _: None), changed_config(f, base_model_name_or_path="a/other")),
        "was trained on another base: its adapter_config.json names 'a/other'",
    ),
    "another scale": (lambda f: changed_config(f, lora_alpha=99), "lora_alpha=99, and lora_alpha=16 is compiled"),
    "another method": (lambda f: changed_config(f, use_dora=True), "use_dora=True, and use_dora=False is compiled"),
    "a missing tensor": (lambda f: changed_weights(f, lambda a: a.pop(NAME)), f"{NAME} is missing"),
    "an unknown tensor": (lambda f: changed_weights(f, lambda a: a.update(x=np.ones(2))), "x is unknown"),
    "another shape": (
        lambda f: changed_weights(f, lambda a: a.update({NAME: np.ones((4, 384), np.float32)})),
        r"lora_A.weight is float32\[4, 384\], not float32\[8, 384\]",
    ),
    "no configuration": (lambda f: (f / CONFIG).unlink(), "is no adapter of PEFT: it has no adapter_config.json"),
    "a damaged configuration": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json is damaged"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "adapter_model.safetensors does not exist"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    case: str, artifact: Path, trained: Path, tmp_path: Path
) -> None:
    change, message = REFUSALS[case]
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter")
    with load(artifact) as session:
        before = session.state()
        with pytest.raises(ArtifactError, match=message):
            session.load_adapter(tmp_path / "adapter")
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_another_name_of_the_same_base_is_accepted_on_request(artifact: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    changed_weights(tmp_path / "adapter", lambda _: None)
    changed_config(tmp_path / "adapter", base_model_name_or_path="a/other")
    with load(artifact) as session:
        session.load_adapter(tmp_path / "adapter", another_base=True)
        for name, tensor in session.manifest.layouts["peft"].tensors.items():
            np.testing.assert_array_equal(session.state()[tensor], load_file(trained / "adapter" / WEIGHTS)[name])


@pytest.mark.slow
def test_the_whole_example_reaches_the_accuracy_of_eager(
    minilm: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All six layers, one epoch of 106 steps; `irongrad train` has no torch."""
    monkeypatch.chdir(tmp_path)
    minilm.news.main()
    step = minilm.make_step()
    ig.compile(step, "build/news", entry_points=("train_step", "eval_step", "predict"))
    without_torch("train", "build/news", "--data", "build/news.npz", "--checkpoint", "build/news.safetensors")
    without_torch(
        "export", "build/news", "--to", "peft", "-o", "build/adapter", "--checkpoint", "build/news.safetensors"
    )
    train, held_out = minilm.news.tokens()
    order = np.random.default_rng((0, 0)).permutation(len(train["labels"]))
    eager = eagerly(step)
    for start in range(0, 1696, 16):
        eager.train_step(**{n: a[order[start : start + 16]] for n, a in train.items()})
    loaded = PeftModel.from_pretrained(minilm.classifier(), "build/adapter")
    parts = [{n: a[i : i + 16] for n, a in held_out.items()} for i in range(0, 416, 16)]
    session = load("build/news", checkpoint="build/news.safetensors")
    hits: dict[str, list[np.ndarray]] = {"compiled": [], "eager": []}
    for part in parts:
        found = logits(session, part)
        np.testing.assert_allclose(eager_logits(loaded, part), found, atol=1e-5)
        hits["compiled"].append(found.argmax(-1) == part["labels"])
        hits["eager"].append(eager_logits(eager.model, part).argmax(-1) == part["labels"])
    accuracy = {name: np.mean(found) for name, found in hits.items()}
    assert accuracy["compiled"] > 0.9, accuracy
    assert abs(accuracy["compiled"] - accuracy["eager"]) < 0.02, accuracy


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_adapter_over_a_quantised_base(
    minilm: ModuleType, base: Path, batches: list[dict[str, np.ndarray]], tmp_path: Path, form: str
) -> None:
    """It trains, and PEFT loads what was exported into a model that is quantised alike, with equal predictions."""
    step = minilm.make_step(BATCH, LENGTH, layers=1, folder=base, form=form)
    net = ig.compile(step, tmp_path / "net").directory
    with load(net) as session:
        losses = [session.train_step(**batch) for _ in range(3) for batch in batches]
        session.save(tmp_path / "net.safetensors")
        expected = logits(session, batches[0])
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    checkpoint = ["--checkpoint", tmp_path / "net.safetensors"]
    without_torch("export", net, "--to", "peft", "-o", tmp_path / "adapter", *checkpoint)
    model = PeftModel.from_pretrained(minilm.classifier(base, layers=1), tmp_path / "adapter")
    np.testing.assert_allclose(eager_logits(ig.quantize(model, form), batches[0]), expected, atol=1e-5)
