"""Tolerances of the oracle for a mixed-precision step: the right graph passes, wrong scales and casts do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.graph.step_graph import StepGraph, Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.pipeline.verify_targets import check_report
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import SCALE, SKIPPED
from irongrad.runtime.report import Comparison, Report
from irongrad.runtime.verification import largest_error

STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
Change = Callable[[str, dict[Value, torch.Tensor]], None]


def make_step(precision: str, scale: float = 2.0**16) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    inputs = {"x": torch.randn(12, 8), "y": torch.randint(0, 4, (12,))}
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if precision == "f16" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return ig.TrainStep(model, cross_entropy, optimizer, inputs, precision=precision, loss_scale=scaler)


def golden_and_graph(step: ig.TrainStep) -> tuple[Golden, StepGraph]:
    captured: CapturedStep = capture(step)
    graph = add_optimizer(differentiate(captured))
    *_, golden = golden_runs(captured, graph, STEPS)
    return golden, graph


def unchanged(function: str, values: dict[Value, torch.Tensor]) -> None:
    pass


def worst(golden: Golden, graph: StepGraph, change: Change = unchanged) -> float:
    """The largest error of a run of `graph`, as a fraction of its tolerance.

    `change` may spoil the values before each function, and after each step (as the function `end`).
    """
    inputs: Mapping[Value, torch.Tensor] = {Value("input", n): t for n, t in graph.inputs.items()}
    values = {**inputs, **{Value("state", t.name): t.initial for t in graph.state}}
    values |= {Value("hyper", n): torch.tensor(v, dtype=torch.float64) for n, v in graph.hypers.items()}
    ratios = []

    def compare(key: str, value: torch.Tensor) -> None:
        error = largest_error(np.asarray(value.double()), golden.expected[key])
        ratios.append(Comparison("", key, error, golden.allowed[key]).ratio)

    for number in range(STEPS):
        for name in ("joint", "update"):
            change(name, values)
            function = graph.functions[name]
            results = interpret(function.graph, [values[a] for a in function.arguments])
            values |= dict(zip(function.results, results, strict=True))
            if name == "joint":
                compare(key_of("loss", number), values[Value("output", "loss")])
                for gradient in graph.gradients:
                    compare(key_of("gradient", number, gradient), values[Value("gradient", gradient)])
        change("end", values)
        for tensor in graph.state:
            compare(key_of("state", number + 1, tensor.name), values[Value("state", tensor.name)])
    return max(ratios)


@pytest.fixture(scope="module", params=DTYPES)
def made(request: pytest.FixtureRequest) -> tuple[torch.dtype, Golden, StepGraph]:
    return DTYPES[request.param], *golden_and_graph(make_step(request.param))


def test_the_right_graph_passes(made: tuple[torch.dtype, Golden, StepGraph]) -> None:
    _, golden, graph = made
    assert golden.oracle == "float64"
    assert worst(golden, graph) < 1.0


def test_an_lstm_in_float16_has_eager_runs_on_every_cpu() -> None:
    """Eager would take the LSTM of oneDNN, which needs instructions for float16 (AVX512-FP16)."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    model = Reader()
    inputs = {"x": torch.randn(12, 5, 8), "y": torch.randint(0, 4, (12,))}
    step = ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01), inputs, precision="f16")
    assert worst(*golden_and_graph(step)) < 1.0


@pytest.mark.parametrize(("key", "is_said"), [(f"state/1/{SKIPPED}", True), ("state/1/0.weight", False)])
def test_a_disagreement_on_skipped_updates_says_what_to_try(key: str, is_said: bool) -> None:
    """A gradient next to float16's largest value may overflow by rounding, which is no bug; another scale avoids it."""
    golden = Golden(1, "float64", {}, {key: np.ones(())}, {key: 0.0})
    report = Report((Comparison("train_step", key, 1.0, 0.0),), 1, golden.oracle)
    with pytest.raises(VerificationError) as error:
        check_report(report, golden)
    assert ("init_scale=2.0**14" in str(error.value)) == is_said


def test_half_precision_parameters_are_found(made: tuple[torch.dtype, Golden, StepGraph]) -> None:
    """The change rounds the parameters after the update. A right step rounds them for the forward only."""
    dtype, golden, graph = made

    def rounding(function: str, values: dict[Value, torch.Tensor]) -> None:
        if function == "end":
            values |= {v: values[v].to(dtype).float() for v in [Value("state", n) for n in graph.gradients]}

    assert worst(golden, graph, rounding) > 2.0


def test_a_wrong_scale_is_found(made: tuple[torch.dtype, Golden, StepGraph]) -> None:
    """The change doubles the gradients, as a wrong scale or a wrong factor in the backward would."""
    _, golden, graph = made

    def doubling(function: str, values: dict[Value, torch.Tensor]) -> None:
        if function == "update":
            values |= {v: 2 * t for v, t in values.items() if v.kind == "gradient"}

    assert worst(golden, graph, doubling) > 2.0


def test_an_overflow_is_part_of_the_golden_steps() -> None:
    """The scale overflows, so the first steps are skipped. The float64 run cannot overflow, but skips them too."""
    golden, graph = golden_and_graph(make_step("f16", 2.0**22))
    scales = [float(golden.expected[key_of("state", n, SCALE)]) for n in range(1, STEPS + 1)]
    skips = [int(golden.expected[key_of("state", n, SKIPPED)][0]) for n in range(1, STEPS + 1)]
    assert scales == [2.0**22 / 2**n for n in skips]
    assert skips[-1] > 0
    assert worst(golden, graph) < 1.0

    def never(function: str, values: dict[Value, torch.Tensor]) -> None:
        if function == "update":
            values |= {v: t.nan_to_num(0.0, 0.0, 0.0) for v, t in values.items() if v.kind == "gradient"}

    assert worst(golden, graph, never) == float("inf")
