"""Compiled steps whose buckets name some of the dynamic dimensions: the others have any size in every bucket."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from tests.fixtures.tagger import batch_of, loss_of, tagger_step

Run = Callable[[list[str]], subprocess.CompletedProcess[str]]


def _step(**options: Any) -> ig.TrainStep:
    return tagger_step(**{"buckets": {"T": [4, 8]}, **options})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("open") / "tagger"
    entry_points = ["train_step", "train_steps", "eval_step", "predict", "reset", "export_state"]
    ig.compile(_step(constraints=["B * T <= 600"]), directory, entry_points=entry_points)
    return directory


@pytest.fixture(scope="module")
def session(artifact: Path) -> Session:
    return ig.runtime.load(artifact)


def test_every_size_trains_one_state_as_eager_does(session: Session, trains_as_eager: Callable[..., None]):
    batches = [batch_of(b, t) for b, t in [(3, 5), (1, 4), (70, 8), (2, 3), (1, 7), (9, 1)]]
    trains_as_eager(session, _step(), batches, rtol=1e-5, state=(1e-4, 1e-5))


def test_outputs_have_their_own_sizes(session: Session):
    session.reset()
    reference = copy.deepcopy(_step().model).double().eval()
    for b, t in [(1, 3), (9, 4), (3, 6), (2, 8)]:
        batch = batch_of(b, t)
        with torch.no_grad():
            expected = reference(batch["x"])
        arrays = {n: v.numpy() for n, v in batch.items()}
        np.testing.assert_allclose(session.predict(x=arrays["x"]), expected.numpy(), rtol=1e-4, atol=1e-5)
        assert session.eval_step(**arrays) == pytest.approx(loss_of(expected, batch["y"]).item(), rel=1e-5)


@pytest.mark.parametrize(("b", "t"), [(2, 4), (11, 5)])
def test_many_steps_in_one_call_are_the_same_steps(session: Session, b: int, t: int):
    batch = {n: v.numpy() for n, v in batch_of(b, t).items()}
    session.reset()
    one_by_one = [session.train_step(**batch) for _ in range(3)]
    expected = session.state()
    session.reset()
    made = session.train_steps(**{n: np.stack([v] * 3) for n, v in batch.items()})
    np.testing.assert_allclose(made, one_by_one, rtol=1e-6)
    for name, value in session.state().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7)


def test_the_manifest_says_which_sizes_there_are(session: Session):
    assert session.manifest.buckets == ({"T": 4}, {"T": 8})
    assert session.manifest.sizes == {"T": (1, 8), "B": (1, None)}
    assert {c.text for c in session.manifest.constraints} == {"B*T <= 600", "B*T != 1"}


REFUSALS = [
    ({"x": (2, 9), "y": (2, 9)}, "x: dimension 1 (T) must be in [1, 8]; the step was not run"),
    ({"x": (2, 4), "y": (3, 4)}, "y: dimension 0 (B) must be as large as dimension 0 of x; the step was not run"),
    ({"x": (151, 4), "y": (151, 4)}, "B, T: the step needs B*T <= 600; the step was not run"),
]


@pytest.mark.parametrize(("shapes", "message"), REFUSALS)
def test_a_session_and_iree_run_module_refuse_in_the_same_words(
    artifact: Path, session: Session, iree_run: Run, shapes: dict[str, tuple[int, int]], message: str
):
    session.reset()
    before = session.state()
    with pytest.raises(GuardError) as error:
        session.train_step(**{n: np.zeros(shape, np.int64) for n, shape in shapes.items()})
    assert message in str(error.value)
    with pytest.raises(GuardError, match=r"y: every value must be in \[0, 3\]"):
        session.train_step(x=np.zeros((7, 3), np.int64), y=np.full((7, 3), 4))
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name])
    values = {n: f"{shape[0]}x{shape[1]}xi64=0" for n, shape in shapes.items()}
    alone = iree_run(run_module(session.manifest, artifact, "train_step", inputs=values))
    assert alone.returncode != 0
    assert message in alone.stderr


def test_an_empty_batch_is_refused(session: Session):
    with pytest.raises(GuardError, match=r"x: dimension 0 \(B\) must be at least 1; the step was not run"):
        session.train_step(x=np.zeros((0, 4), np.int64), y=np.zeros((0, 4), np.int64))


def test_the_golden_checks_pass_and_refuse(artifact: Path, session: Session, iree_run: Run, tmp_path: Path):
    plan = make_plan(session.manifest, {"": read_golden(artifact / GOLDEN)}, initial_state(artifact))
    write_files(plan, session.manifest, tmp_path)
    for check in (c for c in plan.checks if ".train_step" in c.name):
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command]
        result = iree_run(command)
        assert (result.returncode != 0) == bool(check.refusal), check.name
        assert check.refusal in result.stderr


def test_a_fallback_takes_the_sizes_beyond_the_buckets(tmp_path: Path, trains_as_eager: Callable[..., None]):
    step = _step(attends=False, bucket_fallback="dynamic")
    session = ig.compile(step, tmp_path / "tagger", entry_points=["train_step", "reset"]).load()
    assert session.manifest.sizes == {"T": (1, 96), "B": (1, None)}
    batches = [batch_of(b, t) for b, t in [(3, 5), (4, 9), (6, 4), (1, 8), (5, 70), (1, 96)]]
    trains_as_eager(session, step, batches, rtol=1e-5, state=(1e-4, 1e-5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "leave B open: give buckets for B"),
        ({"bucket_fallback": "dynamic"}, "leave B, T open: leave out bucket_fallback and give buckets for B"),
    ],
)
def test_a_budget_of_memory_needs_buckets_for_every_dimension(tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"max_memory needs known sizes.*{message}"):
        ig.compile(_step(**options), tmp_path / "artifact", max_memory="50%")
