"""The oracle runs in a thread beside the passes where neither changes what the other does, and gives the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops import cond
from torch.fx.experimental.proxy_tensor import make_fx

import irongrad as ig
from irongrad.pipeline import driver, early_runs
from irongrad.pipeline.capture import CapturedStep, capture
from irongrad.pipeline.differentiate import differentiate
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.eager_control_flow import eager_control_flow
from irongrad.pipeline.early_runs import first_runs
from irongrad.pipeline.expected import ExpectedAtSizes
from irongrad.pipeline.graphs import StepGraph
from irongrad.pipeline.optimizer import add_optimizer
from irongrad.pipeline.options import Options, make_options
from irongrad.pipeline.oracle import LARGE
from irongrad.pipeline.patches import alone

STEPS = 2


class Branching(nn.Module):
    """A layer whose forward takes one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return cond(y.sum() > 0, lambda t: t * 2, lambda t: t * 3, (y,))


def make_step(model: nn.Module | None = None, **choices: object) -> ig.TrainStep:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
    inputs = {"x": torch.randn(6, 4), "y": torch.randint(0, 4, (6,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs, **choices)  # type: ignore[arg-type]


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every step to be large."""
    monkeypatch.setattr(early_runs, "LARGE", 0)


@pytest.fixture
def captured() -> CapturedStep:
    return capture(make_step())


@pytest.fixture
def graph(captured: CapturedStep) -> StepGraph:
    return add_optimizer(differentiate(captured))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return make_options(tmp_path / "artifact", cache=False)


def threads_of(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads of eager runs, as they are made."""
    threads: list[threading.Thread] = []

    def golden_runs(*arguments: object) -> object:
        threads.append(threading.current_thread())
        return plain(*arguments)

    plain: Callable[..., object] = early_runs.golden_runs
    monkeypatch.setattr(early_runs, "golden_runs", golden_runs)
    return threads


def test_a_large_step_begins_early_and_gives_what_a_small_one_gives_late(
    captured: CapturedStep, graph: StepGraph, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch)

    def run() -> ExpectedAtSizes:
        with first_runs(captured, graph, options, STEPS) as runs:
            assert runs() is runs()
            return runs()

    late = run()
    monkeypatch.setattr(early_runs, "LARGE", 0)
    early = run()
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]
    assert not threads[1].is_alive()
    golden, other = early.own.golden, late.own.golden
    assert golden.allowed == other.allowed
    for key, value in golden.expected.items():
        np.testing.assert_array_equal(value, other.expected[key])
    # The rest of the runs are made here, after the thread has ended.
    assert early.own.widest().allowed == late.own.widest().allowed
    assert early.own.widen() is False


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(
    ("step", "choices"),
    [
        (lambda: make_step(), {"tune": True}),
        (lambda: make_step(), {"stop_after": "import"}),
        (lambda: make_step(Branching()), {}),
        (lambda: make_step(dynamic={"x": {0: "batch"}, "y": {0: "batch"}}), {}),
    ],
    ids=["measuring", "stopped", "branches", "any size"],
)
def test_runs_that_something_else_would_disturb_begin_late(
    step: Callable[[], ig.TrainStep], choices: dict[str, object], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch)
    made = step()
    with first_runs(capture(made), step_graph(made), replace(options, **choices), STEPS) as runs:  # type: ignore[arg-type]
        assert not threads
        runs()
    assert set(threads) == {threading.current_thread()}


def test_a_step_is_large_from_a_million_elements_on(
    captured: CapturedStep, graph: StepGraph, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    for elements, early in ((LARGE, False), (LARGE + 1, True)):
        monkeypatch.setattr(early_runs, "elements_of", lambda graph, n=elements: n)
        threads = threads_of(monkeypatch)
        with first_runs(captured, graph, options, STEPS) as runs:
            runs()
        assert (threads[0] is not threading.current_thread()) is early


@pytest.mark.usefixtures("all_large")
def test_runs_end_where_a_pass_fails(captured: CapturedStep, graph: StepGraph, options: Options) -> None:
    with pytest.raises(ZeroDivisionError), first_runs(captured, graph, options, 10**9):
        raise ZeroDivisionError


@pytest.mark.usefixtures("all_large")
def test_an_error_of_a_run_is_raised_where_it_is_asked_for(
    captured: CapturedStep, graph: StepGraph, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def golden_runs(*arguments: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(early_runs, "golden_runs", golden_runs)
    with first_runs(captured, graph, options, STEPS) as runs, pytest.raises(ZeroDivisionError):
        runs()


@pytest.mark.usefixtures("all_large")
def test_what_is_compiled_beside_early_runs_is_verified_against_them(tmp_path: Path) -> None:
    step = make_step(dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, buckets=({"batch": 4}, {"batch": 8}))
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",), cache=False)
    certificate = artifact.manifest.targets[0].certificate
    assert certificate.steps == driver.GOLDEN_STEPS
    assert certificate.oracle == "float64"


def test_who_patches_waits_for_who_is_alone() -> None:
    """So `make_fx`, which patches every module's call, waits for an eager run in another thread."""
    events: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with alone():
            inside.set()
            leave.wait()
            events.append("run")

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    threading.Timer(0.05, leave.set).start()
    with alone(), alone():
        events.append("patched")
    thread.join()
    assert events == ["run", "patched"]


def test_another_thread_traces_control_flow_while_one_runs_it() -> None:
    """A branch that is taken in Python would be missing from what the other thread traces."""
    x = torch.ones(3)

    def both(predicate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cond(predicate, lambda t: t + 1, lambda t: t - 1, (x,))

    def trace() -> torch.fx.GraphModule:
        return make_fx(both, tracing_mode="fake")(torch.tensor(True), x)

    with eager_control_flow(), ThreadPoolExecutor(1) as beside:
        torch.testing.assert_close(both(torch.tensor(False), x), x - 1)
        graph = beside.submit(trace).result()
    assert torch.ops.higher_order.cond in [n.target for n in graph.graph.nodes]
