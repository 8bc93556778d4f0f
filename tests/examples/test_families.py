"""Five model families, compiled, trained on ten or twenty real batches, and compared with eager PyTorch.

The loss and the full state of every step must meet the project's number contract. The allowed error against eager
float64 is a small factor of the error of eager float32, over runs with perturbed rounding. Such runs drift apart as
training goes on, so the allowed error of the compiled step grows too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import irongrad as ig
from irongrad.graph.step_graph import StateTensor, StepGraph
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.oracle.eager_run import eager_state
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.runtime.session import Session
from irongrad.runtime.tolerance import FACTOR, FLOOR_ULPS, NOISY_RUNS
from irongrad.runtime.verification import largest_error
from tests.fixtures.step_copies import twin_of

EXAMPLES = Path(__file__).parents[2] / "examples"
Batch = dict[str, np.ndarray]
States = list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Family:
    """An example and the sizes to test it at.

    Attributes:
        name: the module of the example.
        data: arguments of both `make_step` and `batches`.
        sizes: arguments of `make_step` alone.
        lr: a learning rate instead of the example's. With a large rate the first steps may be chaotic: eager runs then
            differ from each other so much that a comparison with them shows nothing.
        steps: the number of training batches.
    """

    name: str
    data: dict[str, Any]
    sizes: dict[str, Any]
    lr: float | None = None
    steps: int = 10

    def load(self) -> ModuleType:
        return importlib.import_module(self.name)

    def step(self) -> ig.TrainStep:
        step: ig.TrainStep = self.load().make_step(**self.data, **self.sizes)
        for group in step.optimizers[0].param_groups if self.lr is not None else ():
            group["lr"] = self.lr
        return step

    def batches(self) -> list[Batch]:
        known = {k: v for k, v in self.data.items() if k != "cell"}
        return list(islice(self.load().batches(**known, seed=1), self.steps))


_RNN = {"batch": 4, "length": 4}
_RNN_SIZES = {"width": 8}

SMALL = {
    "mlp": Family("mlp", {"batch": 16}, {"hidden": 32}),
    "resnet18": Family("resnet18", {"batch": 8}, {"width": 4}, lr=0.005),
    "lstm": Family("rnn", _RNN, {"cell": "lstm", **_RNN_SIZES}),
    "bidirectional gru": Family("rnn", {**_RNN, "bidirectional": True}, {"cell": "gru", **_RNN_SIZES}),
    "gpt": Family("gpt", {"batch": 2, "length": 16}, {"width": 16, "heads": 2, "layers": 2}),
    "moe": Family("moe", {"batch": 8}, {"width": 16}),
}

# The cell and direction pairs that `SMALL` leaves out.
ALSO = {
    "gru": Family("rnn", _RNN, {"cell": "gru", **_RNN_SIZES}),
    "bidirectional lstm": Family("rnn", {**_RNN, "bidirectional": True}, {"cell": "lstm", **_RNN_SIZES}),
}

MEDIUM = {
    "mlp": Family("mlp", {}, {}),
    "resnet18": Family("resnet18", {"batch": 32}, {"width": 16}, lr=0.005),
    "two-layer lstm": Family("rnn", {"batch": 16, "length": 16}, {"cell": "lstm", "width": 32, "layers": 2}),
    "two-layer bidirectional gru": Family(
        "rnn", {"batch": 16, "length": 12, "bidirectional": True}, {"cell": "gru", "width": 32, "layers": 2}
    ),
    "gpt": Family("gpt", {"batch": 8, "length": 32}, {"width": 64, "layers": 3}),
    "moe": Family("moe", {}, {"experts": 8}),
}


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The eager operators are tiny here, so on a busy machine several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled `SMALL` artifacts, by name; tests fill it."""
    return tmp_path_factory.mktemp("families")


# tests/pipeline/test_memory_budget.py and tests/padding/test_steps.py compile convolutions too, and
# tests/operators/decompositions/test_sorting.py compiles a router.
SLOW = ("resnet18", "moe")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SMALL])
def test_family_trains_as_eager_does(name: str, artifacts: Path) -> None:
    check(SMALL[name], artifacts / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO)
def test_the_other_cell_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    """`./scripts/test -m slow tests/examples` runs these; `SMALL` already has each cell and each direction once."""
    check(ALSO[name], tmp_path / "artifact")


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIUM)
def test_larger_family_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    """`./scripts/test -m slow tests/examples` runs these, on twice as many batches."""
    check(replace(MEDIUM[name], steps=20), tmp_path / "artifact")


def test_the_comparison_refuses_a_wrong_state(artifacts: Path) -> None:
    """A learning rate that is a thousandth too large is found, so the tests above can fail."""
    step, batches = SMALL["mlp"].step(), SMALL["mlp"].batches()
    session = compiled(step, artifacts / "mlp")
    found = run_compiled(session, batches, lr=1.001e-3)
    with pytest.raises(AssertionError, match="weight after step 1 "):
        compare(found, *oracle(step, session, batches))


def check(family: Family, output: Path) -> None:
    """Compile a family, train it on real batches, and compare every loss and state with eager PyTorch."""
    step, batches = family.step(), family.batches()
    assert len(batches) == family.steps
    session = compiled(step, output)
    compare(run_compiled(session, batches), *oracle(step, session, batches))


def compiled(step: ig.TrainStep, output: Path) -> Session:
    """Compile `step` to `output`, unless that exists, and load it."""
    return Session(output) if output.exists() else ig.compile(step, output, entry_points=("train_step",)).load()


def run_compiled(session: Session, batches: Sequence[Batch], **hypers: float) -> States:
    """Return the state after each step, with the loss of the step under the name `loss`, and tied tensors under one."""
    result: States = []
    for batch in batches:
        loss = np.asarray(session.train_step(**batch, **hypers))
        state = session.state()
        result.append({"loss": loss, **{s.name: state[s.name] for s in session.manifest.state}})
    return result


def oracle(step: ig.TrainStep, session: Session, batches: Sequence[Batch]) -> tuple[States, list[States]]:
    """Run eagerly in float64, and in float32: once plainly, and several times with perturbed rounding."""
    initial = session.initial_state()
    state = tuple(StateTensor(s.name, s.role, torch.from_numpy(initial[s.name])) for s in session.manifest.state)
    graph = StepGraph(state, (), step.inputs, {})
    exact = list(run_eager(step, graph, batches, torch.float64, None))
    samples = [list(run_eager(step, graph, batches, torch.float32, s)) for s in (None, *range(NOISY_RUNS))]
    return exact, samples


def run_eager(
    step: ig.TrainStep, graph: StepGraph, batches: Sequence[Batch], dtype: torch.dtype, seed: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """Train a copy of `step` eagerly; yield the same values as `run_compiled`, in float64."""
    twin = twin_of(step, dtype)
    module = StepModule(twin).train()
    with RoundingNoise(seed) if seed is not None else nullcontext():
        for number, batch in enumerate(batches, start=1):
            tensors = [torch.from_numpy(batch[name]) for name in twin.inputs]
            for optimizer in twin.optimizers:
                optimizer.zero_grad()
            loss = module(*(t.to(dtype) if t.is_floating_point() else t for t in tensors))
            loss.backward()
            if twin.clip_grad_norm is not None:
                clip_grad_norm_(module.parameters(), twin.clip_grad_norm)
            for optimizer in twin.optimizers:
                optimizer.step()
            state = {"loss": loss, **eager_state(module, twin, graph, number)}
            yield {n: t.detach().to(torch.float64).numpy().copy() for n, t in state.items()}


def compare(found: States, exact: States, samples: list[States]) -> None:
    """Assert that every value of every step meets the number contract."""
    for number, (got, expected) in enumerate(zip(found, exact, strict=True)):
        assert got.keys() == expected.keys()
        for name, value in got.items():
            allowed = _allowed(expected[name], [s[number][name] for s in samples])
            error = largest_error(value, expected[name])
            assert error <= allowed, f"{name} after step {number + 1} is off by {error}, allowed is {allowed}"


def _allowed(exact: np.ndarray, samples: list[np.ndarray]) -> float:
    spread = max(largest_error(s, exact) for s in samples)
    return FACTOR * spread + FLOOR_ULPS * float(np.finfo(np.float32).eps) * float(np.max(np.abs(exact), initial=0.0))
