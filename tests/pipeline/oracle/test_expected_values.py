"""As few eager runs as settle the verdict of all runs; stored tolerances are those of all runs, for other devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.pipeline.oracle import expected_values as module
from irongrad.pipeline.oracle.eager_run import run_eager
from irongrad.pipeline.oracle.expected_values import Expected, verify_against
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.report import Comparison, Report
from irongrad.runtime.tolerance import NOISY_RUNS, SETTLED
from irongrad.runtime.verification import largest_error

BOUNDS = (1.0, 1.5, 2.5, 4.0)
KEY = "loss/0/"
STEPS = 3


def runs_of(bounds: tuple[float, ...], made: list[float]) -> Iterator[Golden]:
    for bound in bounds:
        made.append(bound)
        yield Golden(1, "float64", {}, {KEY: np.array(0.0)}, {KEY: bound})


@pytest.mark.parametrize(
    ("error", "runs"), [(0.1, 1), (0.75, 1), (0.8, 2), (1.1, 2), (1.2, 3), (1.9, 4), (3.9, 4), (4.1, 4), (np.inf, 4)]
)
def test_runs_are_made_until_the_verdict_is_clear(monkeypatch: pytest.MonkeyPatch, error: float, runs: int) -> None:
    def golden_steps(session: object, golden: Golden, *, is_fresh: bool) -> Report:
        assert is_fresh
        return Report((Comparison("train_step", KEY, error, golden.allowed[KEY]),), 1, "float64")

    monkeypatch.setattr(module, "golden_steps", golden_steps)
    made: list[float] = []
    expected = Expected(runs_of(BOUNDS, made))
    report = verify_against(SimpleNamespace(), expected)  # type: ignore[arg-type]
    assert made == list(BOUNDS[:runs])
    assert report.passed == (error <= max(BOUNDS))
    assert report.comparisons[0].allowed == expected.golden.allowed[KEY] == BOUNDS[runs - 1]
    assert report.worst.ratio <= SETTLED or runs == len(BOUNDS)
    assert expected.widest().allowed[KEY] == max(BOUNDS)


class Spoiled(nn.Module):
    """A network whose normalisation a test can make wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.inner, self.outer, self.wrong = nn.Linear(8, 16), nn.Linear(16, 4), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.layer_norm(self.inner(x), (16,), eps=1.2e-5 if self.wrong == "epsilon" else 1e-5)
        if self.wrong == "rounded":
            hidden = hidden.bfloat16().float()
        return self.outer(nn.functional.gelu(hidden) * (1.00005 if self.wrong == "constant" else 1.0))


def make_step(wrong: str = "") -> ig.TrainStep:
    torch.manual_seed(0)
    model = Spoiled(wrong)
    inputs = {"x": torch.randn(12, 8), "y": torch.randint(0, 4, (12,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)


@dataclass(frozen=True)
class Runs:
    """A step, its graph, and the golden values after each number of eager runs."""

    captured: CapturedStep
    graph: StepGraph
    goldens: Sequence[Golden]

    def errors_of(self, step: ig.TrainStep) -> Mapping[str, float]:
        found: dict[str, float] = {}

        def record(key: str, tensor: torch.Tensor) -> None:
            found[key] = largest_error(np.asarray(tensor.detach()), self.goldens[0].expected[key])

        run_eager(replace(self.captured, step=step), self.graph, None, STEPS, None, record)
        return found


@pytest.fixture(scope="module")
def runs() -> Runs:
    captured = capture(make_step())
    graph = add_optimizer(differentiate(captured))
    return Runs(captured, graph, list(golden_runs(captured, graph, STEPS)))


def test_tolerances_never_shrink_with_more_runs(runs: Runs) -> None:
    goldens = runs.goldens
    assert len(goldens) == NOISY_RUNS + 1
    for one, other in itertools.pairwise(goldens):
        assert all(one.allowed[key] <= other.allowed[key] for key in one.allowed)
        assert one.expected is other.expected
    assert goldens[0].allowed != goldens[-1].allowed


def worst(errors: Mapping[str, float], golden: Golden) -> float:
    return max(Comparison("", key, error, golden.allowed[key]).ratio for key, error in errors.items())


def test_the_first_run_is_enough_for_a_right_step(runs: Runs) -> None:
    errors = runs.errors_of(make_step())
    assert {key_of("loss", 0), key_of("state", 3, "inner.weight"), key_of("gradient", 2, "outer.bias")} <= errors.keys()
    assert worst(errors, runs.goldens[0]) <= SETTLED


@pytest.mark.parametrize("wrong", ["epsilon", "rounded", "constant"])
def test_no_number_of_runs_allows_a_wrong_step(runs: Runs, wrong: str) -> None:
    errors = runs.errors_of(make_step(wrong))
    assert min(worst(errors, golden) for golden in runs.goldens) > 1.0
