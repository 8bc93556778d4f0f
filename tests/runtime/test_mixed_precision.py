"""A compiled float16 step with a dynamic loss scale and two micro-batches: overflow, growth, resume, inspection."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.cli import inspect
from irongrad.runtime import Session
from irongrad.runtime.manifest import GROWTH_TRACKER, SCALE, SKIPPED, STEPS
from irongrad.runtime.nonfinite import NonFiniteWarning

ENTRY_POINTS = ("train_step", "grad_step", "apply_step", "export_gradients", "reset")


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    return ig.TrainStep(
        model,
        nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        {"x": torch.randn(12, 8), "y": torch.randint(0, 4, (12,))},
        clip_grad_norm=1.0,
        precision="f16",
        loss_scale=torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2),
        accumulate=2,
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact. Compiling verifies gradients, BatchNorm statistics and the scale of three steps."""
    directory = tmp_path_factory.mktemp("precision") / "net"
    ig.compile(make_step(), directory, entry_points=ENTRY_POINTS)
    return directory


@pytest.fixture
def session(artifact: Path) -> Session:
    return Session(artifact)


def batch(number: int, *, overflow: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    x = rng.standard_normal((12, 8)).astype(np.float32)
    if overflow:
        x[-1, 0] = np.inf  # in the second micro-batch
    return {"x": x, "y": rng.integers(0, 4, 12, dtype=np.int64)}


def scale_of(session: Session) -> tuple[float, int, list[int], int]:
    state = session.state()
    return float(state[SCALE]), int(state[GROWTH_TRACKER]), state[SKIPPED].tolist(), int(state[STEPS])


def test_overflow_skips_the_update_and_two_good_steps_double_the_scale(session: Session) -> None:
    found = [scale_of(session)]
    for number, overflow in enumerate([False, False, True, False, False]):
        before = session.state()
        session.train_step(**batch(number, overflow=overflow))
        after = session.state()
        trained = ("0.weight", "3.bias", "optimizer/momentum_buffer/0.weight")
        assert all(np.array_equal(before[n], after[n]) == overflow for n in trained)
        assert all(np.isfinite(after[n]).all() for n in trained)
        found.append(scale_of(session))
    assert found == [
        (256.0, 0, [0], 0),
        (256.0, 1, [0], 1),
        (512.0, 0, [0], 2),
        (256.0, 0, [1], 3),
        (256.0, 1, [1], 4),
        (512.0, 0, [1], 5),
    ]


def test_accumulated_gradients_are_scaled_until_they_are_applied(session: Session) -> None:
    """grad_step and apply_step make the update of train_step, over the same micro-batches."""
    session.train_step(**batch(0))
    expected = session.state()
    session.reset()
    session.grad_step(**batch(0))
    scaled = session.gradients()[0]["3.bias"]
    assert session.apply_step() == 1
    assert 0.01 < np.abs(scaled).max() / 256.0 < 1.0
    for name, value in session.state().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_options_of_the_scaler_are_run_time_inputs(session: Session) -> None:
    session.train_step(**batch(0), growth_interval=1, growth_factor=8.0)
    assert scale_of(session)[:2] == (2048.0, 0)
    session.train_step(**batch(0, overflow=True), backoff_factor=0.125)
    assert scale_of(session)[:2] == (256.0, 0)


def test_a_checkpoint_has_the_scale_and_training_goes_on_exactly(session: Session, artifact: Path, tmp_path) -> None:
    path = tmp_path / "three.safetensors"
    for number in range(3):
        session.train_step(**batch(number, overflow=number == 1))
    # The overflowing batch leaves NaN in BatchNorm's statistics, as in eager.
    with pytest.warns(NonFiniteWarning, match="1.running_mean, 1.running_var"):
        session.save(path)
    rest = [session.train_step(**batch(number)) for number in (3, 4)]
    resumed = ig.runtime.load(artifact, checkpoint=path, on_nonfinite="ignore")
    assert [resumed.train_step(**batch(number)) for number in (3, 4)] == rest
    assert scale_of(resumed) == scale_of(session) == (256.0, 1, [1], 5)
    one, other = session.state(), resumed.state()
    assert all(np.array_equal(one[n], other[n], equal_nan=True) for n in one)

    step, scaler = make_step(), torch.amp.GradScaler("cpu")
    ig.load_checkpoint(path, step.model, step.optimizers, scaler)
    assert (scaler.get_scale(), scaler._init_growth_tracker) == (128.0, 1)
    back = tmp_path / "back.safetensors"
    ig.save_checkpoint(back, step.model, step.optimizers, artifact, scaler)
    resumed.restore(back)
    assert scale_of(resumed)[:2] == (128.0, 1)

    shown = CliRunner().invoke(inspect.command, [str(artifact), "--checkpoint", str(path), "--json"])
    report = json.loads(shown.output)
    assert report["values"] == {SCALE: 128.0, GROWTH_TRACKER: 1, SKIPPED: [1], STEPS: 3}
    assert report["precision"] == "f16"
