"""A session against a model in numpy: random sequences of training, saving, restoring, refusals, forks and closing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.manifest import STEPS

ROWS, WIDTH, RATE = 4, 3, 0.05


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear model, its squared error, and SGD: an update is three lines of numpy."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 1)
    inputs = {"x": torch.randn(ROWS, WIDTH), "target": torch.randn(ROWS, 1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    directory = tmp_path_factory.mktemp("stateful") / "linear"
    ig.compile(ig.TrainStep(model, torch.nn.functional.mse_loss, optimizer, inputs), directory)
    return directory


class Model:
    """The same training in float64."""

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self.weight, self.bias = state["weight"].astype(float), state["bias"].astype(float)
        self.steps = int(state[STEPS])

    def train(self, batch: dict[str, np.ndarray], rate: float) -> float:
        """Update, and return the loss before."""
        error = batch["x"] @ self.weight.T + self.bias - batch["target"]
        self.weight = self.weight - rate * 2 / ROWS * error.T @ batch["x"]
        self.bias = self.bias - rate * 2 / ROWS * error.sum(0)
        self.steps += 1
        return float((error**2).mean())

    def state(self) -> dict[str, np.ndarray]:
        """As `Session.state`."""
        return {"weight": self.weight, "bias": self.bias, STEPS: np.array(self.steps)}


def batch_of(seed: int, steps: int | None = None) -> dict[str, np.ndarray]:
    """A random batch, or several that are stacked."""
    rng = np.random.default_rng(seed)
    lead = () if steps is None else (steps,)
    return {
        "x": rng.standard_normal((*lead, ROWS, WIDTH)).astype(np.float32),
        "target": rng.standard_normal((*lead, ROWS, 1)).astype(np.float32),
    }


class Sessions(RuleBasedStateMachine):
    """Rules over one session and its model."""

    artifact: Path
    device: str
    checkpoints = Bundle("checkpoints")

    @initialize()
    def load(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.session = Session(self.artifact, device=self.device)
        self.model = Model(self.session.state())
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
            self.folder.cleanup()

    @rule(seed=st.integers(0, 99), rate=st.sampled_from([None, 0.0, 0.01]))
    def train(self, seed: int, rate: float | None) -> None:
        batch = batch_of(seed)
        loss = self.session.train_step(**batch, **({} if rate is None else {"lr": rate}))
        assert loss == pytest.approx(self.model.train(batch, RATE if rate is None else rate), rel=1e-4, abs=1e-6)

    @rule(seed=st.integers(0, 99), steps=st.integers(1, 40))
    def train_many(self, seed: int, steps: int) -> None:
        stacked = batch_of(seed, steps)
        losses = self.session.train_steps(**stacked)
        expected = [self.model.train({n: a[i] for n, a in stacked.items()}, RATE) for i in range(steps)]
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)

    @rule(seed=st.integers(0, 99))
    def accumulate(self, seed: int) -> None:
        batch = batch_of(seed)
        self.session.grad_step(**batch)
        self.session.apply_step()
        self.model.train(batch, RATE)

    @rule(target=checkpoints)
    def save(self) -> tuple[Path, dict[str, np.ndarray]]:
        self.count += 1
        path = Path(self.folder.name) / f"state {self.count}"
        self.session.save(path)
        return path, self.model.state()

    @rule(saved=checkpoints)
    def restore(self, saved: tuple[Path, dict[str, np.ndarray]]) -> None:
        self.session.restore(saved[0])
        self.model = Model(saved[1])

    @rule(saved=checkpoints)
    def load_from(self, saved: tuple[Path, dict[str, np.ndarray]]) -> None:
        self.session.close()
        self.session = Session(self.artifact, device=self.device, checkpoint=saved[0])
        self.model = Model(saved[1])

    @rule(saved=checkpoints, place=st.integers(0, 10_000), mask=st.integers(1, 255))
    def damage(self, saved: tuple[Path, dict[str, np.ndarray]], place: int, mask: int) -> None:
        good = saved[0].read_bytes()
        data = bytearray(good)
        data[-1 - place % 40] ^= mask  # in the tensors
        saved[0].write_bytes(data)
        with pytest.raises(ArtifactError):
            self.session.restore(saved[0])
        saved[0].write_bytes(good)

    @rule(kind=st.sampled_from(["shape", "rate", "missing", "unknown", "stack", "state"]))
    def refuse(self, kind: str) -> None:
        batch, state = batch_of(0), self.session.state()
        refused = {
            "shape": lambda: self.session.train_step(**batch | {"x": batch["x"][:2]}),
            "rate": lambda: self.session.train_step(**batch, lr=float("nan")),
            "missing": lambda: self.session.train_step(x=batch["x"]),
            "unknown": lambda: self.session.train_step(**batch, momentum=0.1),
            "stack": lambda: self.session.train_steps(**batch_of(0, 3) | {"x": batch_of(0, 2)["x"]}),
            "state": lambda: self.session.load_state({**state, "weight": np.zeros((2, 2), np.float32)}),
        }
        with pytest.raises((GuardError, ArtifactError)):
            refused[kind]()

    @rule()
    def fork(self) -> None:
        if (child := os.fork()) == 0:
            try:
                loss = self.session.train_step(**batch_of(0))
                os._exit(0 if self.device == "local-sync" and np.isfinite(loss) else 1)
            except UserError:
                os._exit(0 if self.device == "local-task" else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @rule()
    def close(self) -> None:
        state = self.session.state()
        self.session.close()
        with pytest.raises(UserError, match="closed"):
            self.session.train_step(**batch_of(0))
        self.session = Session(self.artifact, device=self.device)
        self.session.load_state(state)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "session"):
            found = self.session.state()
            for name, value in self.model.state().items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


# JAX warns of forks wherever another test has imported it.
@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
@pytest.mark.parametrize("device", ["local-sync", "local-task"])
@pytest.mark.parametrize("examples", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_random_sequences_agree_with_a_model(artifact, device, examples):
    machine = type("Machine", (Sessions,), {"artifact": artifact, "device": device})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=checks, derandomize=True
    )
    run_state_machine_as_test(machine, settings=chosen)
