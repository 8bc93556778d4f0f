"""The first runs of the oracle, in a background thread, equal the runs of the main thread."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline import driver
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.pipeline.oracle import background_runs, chosen_steps, eager_run
from irongrad.pipeline.oracle.background_runs import first_runs
from irongrad.pipeline.oracle.expected_values import Expected
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.runtime.errors import ToolchainError

STEPS = 2


def make_step(**choices: object) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
    inputs = {"x": torch.randn(6, 4), "y": torch.randint(0, 4, (6,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs, **choices)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture(make_step())


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return driver.step_graph(make_step())


class Begun(dict[str, list[threading.Thread]]):
    """The threads in which runs begin: of the step's own sizes (`chosen_steps`), and of others (`background_runs`)."""

    @property
    def all(self) -> set[threading.Thread]:
        """Those of all runs."""
        return {thread for found in self.values() for thread in found}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    found = Begun(own=[], others=[])

    def recorded(of: str, *arguments: Any) -> object:
        found[of].append(threading.current_thread())
        return golden_runs(*arguments)

    monkeypatch.setattr(chosen_steps, "golden_runs", partial(recorded, "own"))
    monkeypatch.setattr(background_runs, "golden_runs", partial(recorded, "others"))
    return found


def test_background_runs_equal_runs_in_this_thread(captured: CapturedStep, graph: StepGraph, begun: Begun) -> None:
    here = Expected(golden_runs(captured, graph, STEPS))
    with first_runs({"": (captured, graph)}, STEPS) as runs:
        own = runs.result()[""].own
        assert runs.result()[""].own is own
    assert begun.all
    assert not any(thread.is_alive() for thread in begun.all)
    assert own.golden.allowed == here.golden.allowed
    for key, value in own.golden.expected.items():
        np.testing.assert_array_equal(value, here.golden.expected[key])
    # The thread has ended, so this thread makes the other runs.
    assert own.widest().allowed == here.widest().allowed


def test_a_huge_step_waits_for_the_compiler_and_keeps_what_its_last_step_leaves(
    captured: CapturedStep, graph: StepGraph, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Expected(golden_runs(captured, graph, STEPS)).golden
    monkeypatch.setattr(eager_run, "HUGE", 0)
    with first_runs({"": (captured, graph)}, STEPS) as runs:
        assert not begun.all
        runs.alone()
        golden = runs.result()[""].own.golden
    left = {key for key in here.expected if not key.startswith("state/") or key.startswith(f"state/{STEPS}/")}
    assert golden.expected.keys() == golden.allowed.keys() == left < here.expected.keys()
    for key in left:
        np.testing.assert_allclose(golden.expected[key], here.expected[key], rtol=1e-12, atol=1e-15)


def test_a_huge_step_that_fails_meanwhile_makes_no_runs(
    captured: CapturedStep, graph: StepGraph, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_run, "HUGE", 0)
    with pytest.raises(ZeroDivisionError), first_runs({"": (captured, graph)}, STEPS):
        raise ZeroDivisionError
    assert not begun.all


def test_background_runs_end_when_a_stage_fails(captured: CapturedStep, graph: StepGraph) -> None:
    """Without an end the runs would take years."""
    with pytest.raises(ZeroDivisionError), first_runs({"": (captured, graph)}, 10**9):
        raise ZeroDivisionError


def test_an_error_in_the_background_is_raised_when_the_runs_are_read(
    captured: CapturedStep, graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def golden_runs(*arguments: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(chosen_steps, "golden_runs", golden_runs)
    with first_runs({"": (captured, graph)}, STEPS) as runs, pytest.raises(ZeroDivisionError):
        runs.result()


def test_a_build_starts_background_runs_after_its_passes(
    tmp_path: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []

    def failing(*arguments: object) -> object:
        stages.append("import")
        raise ToolchainError("no")

    def optimised(*arguments: object) -> object:
        assert not begun.all
        stages.append("passes")
        return plain(*arguments)  # type: ignore[arg-type]

    plain = driver._optimised
    monkeypatch.setattr(driver, "_optimised", optimised)
    monkeypatch.setattr(driver, "import_functions", failing)
    with pytest.raises(ToolchainError):
        build(make_step(), make_options(tmp_path / "artifact", cache=False))
    assert stages == ["passes", "import"]
    (thread,) = begun.all
    assert not thread.is_alive()


def test_each_bucket_is_run(tmp_path: Path, begun: Begun) -> None:
    step = make_step(dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, buckets=({"batch": 4}, {"batch": 8}))
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",), cache=False)
    assert len(begun["others"]) == 1
    assert len(begun.all - {threading.current_thread()}) == 1
    certificate = artifact.manifest.targets[0].certificate
    assert (certificate.steps, certificate.oracle) == (driver.GOLDEN_STEPS, "float64")
