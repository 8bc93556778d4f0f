"""Indices into a named dimension, such as the position of a last word: their range depends on the size of the call."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.graph.step_graph import Range
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.manifest import GOLDEN, UNLIMITED
from irongrad.sizes.expressions import symbol

WORDS, B, T = 9, 3, 5


class _LastWord(nn.Module):
    """Classifies sentences by the features at their last words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        seen = self.embedding(x).tanh()
        gathered = seen.gather(1, last[:, None, None].expand(-1, 1, 6))[:, 0]
        return self.head(gathered * seen[torch.arange(x.shape[0]), last])


def _batch(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    x = torch.randint(0, WORDS, (b, t), generator=generator)
    last = torch.randint(0, t, (b,), generator=generator)
    last[0] = t - 1
    return {"x": x, "last": last, "y": torch.randint(0, 3, (b,), generator=generator)}


def _step(**options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = _LastWord()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"x": {0: "B", 1: "T"}, "last": {0: "B"}, "y": {0: "B"}}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, _batch(B, T), dynamic=names, **options)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = _step(buckets={"B": [4], "T": [4, 8]})
    entries = ("train_step", "train_steps", "predict")
    return ig.compile(step, tmp_path_factory.mktemp("limits") / "a", entry_points=entries, opt_level=0).directory


@pytest.fixture(scope="module")
def of_any_size(tmp_path_factory: pytest.TempPathFactory) -> Session:
    entries = ("predict", "train_steps", "reset")
    return ig.compile(_step(), tmp_path_factory.mktemp("any") / "a", entry_points=entries, opt_level=0).load()


@pytest.fixture
def session(artifact: Path) -> Session:
    return Session(artifact)


def _arrays(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in batch.items()}


def test_the_range_depends_on_the_size_of_the_call():
    found = {r.input: r for r in step_indices(capture(_step())).ranges}
    assert found["last"] == Range("last", 0, UNLIMITED, limits=(symbol("T") - 1,))
    assert found["x"] == Range("x", 0, WORDS - 1)


@pytest.mark.parametrize("t", [1, 3, 8])
def test_every_index_within_the_size_of_the_call_is_accepted(session: Session, of_any_size: Session, t: int):
    batch = _batch(B, t)
    model = _step().model
    expected = model(batch["x"], batch["last"]).detach().numpy()
    given = _arrays({n: batch[n] for n in ("x", "last")})
    for found in (session.predict(**given), of_any_size.predict(**given)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    loss = session.train_step(**_arrays(batch))
    expected = nn.functional.cross_entropy(model(batch["x"], batch["last"]), batch["y"])
    assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("t", [3, 8])
@pytest.mark.parametrize("entry", ["train_step", "train_steps", "predict"])
def test_an_index_past_the_end_is_refused(session: Session, entry: str, t: int):
    batch = _arrays(_batch(B, t))
    batch["last"][1] = t
    if entry == "predict":
        del batch["y"]
    if entry == "train_steps":
        right = _arrays(_batch(B, t))
        batch = {n: np.stack([right[n], batch[n]]) for n in batch}
    before = session.state()
    says = rf"last: every value must be in \[0, T - 1\]; .* expected {t - 1} but have {t};"
    with pytest.raises(GuardError, match=says):
        session.call(entry, batch)
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("word", [WORDS, 1 << 40, -(1 << 40)])
def test_nothing_is_read_before_the_checks(artifact: Path, session: Session, word: int):
    """The gradient of an embedding is added at the index, which would be far outside of the buffer here."""
    batch = _arrays(_batch(B, T))
    expected = Session(artifact).train_step(**batch)
    with pytest.raises(GuardError, match=r"x: every value must be in \[0, 8\]"):
        session.train_step(**{**batch, "x": np.full_like(batch["x"], word)})
    assert session.train_step(**batch) == expected


@pytest.mark.parametrize("t", [1, 40])
def test_steps_of_any_size_accept_every_index_in_range(of_any_size: Session, t: int):
    """In IREE a slice of stacked vectors aliases the caller's buffer; a slice of stacked matrices is a copy."""
    model, batches = _step().model.double(), [_batch(B, t), _batch(B, t)]
    batches[1]["x"] = batches[1]["x"].flip(0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(batch["x"], batch["last"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    of_any_size.reset()
    stack = {name: np.stack([batch[name].numpy() for batch in batches]) for name in batches[0]}
    np.testing.assert_allclose(of_any_size.train_steps(**stack), losses, rtol=1e-5)


def test_an_index_past_the_end_is_refused_at_any_size(of_any_size: Session):
    batch = _arrays(_batch(B, 40))
    batch["last"][1] = 40
    with pytest.raises(GuardError, match=r"last: every value must be in \[0, T - 1\]; .* expected 39 but have 40;"):
        of_any_size.predict(x=batch["x"], last=batch["last"])


def test_the_golden_checks_are_refused_at_every_size(
    artifact: Path, session: Session, iree_run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
):
    plan = make_plan(session.manifest, {"": read_golden(artifact / GOLDEN)}, session.initial_state())
    write_files(plan, session.manifest, tmp_path)
    checks = [c for c in plan.checks if c.name.endswith(".out_of_range.last")]
    assert checks
    for check in checks:
        result = iree_run([a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command])
        assert result.returncode != 0
        assert check.refusal in result.stderr
