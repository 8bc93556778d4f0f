"""Eager runs beside the compiler, and the golden values that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, golden_runs_of_function, trace_function
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline import package
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.oracle import chosen_steps, eager_inference, eager_run, expected_values, oracle
from irongrad.pipeline.oracle.eager_loss_scale import Skips
from irongrad.pipeline.oracle.eager_run import half_of_the_threads, run_eager
from irongrad.pipeline.oracle.steps_at_rest import resting
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import InternalError
from irongrad.runtime.golden import Golden, kept, read_golden
from irongrad.runtime.report import Report
from irongrad.runtime.session import Session
from irongrad.runtime.tolerance import NOISY_RUNS
from irongrad.runtime.verification import golden_steps


def test_eager_leaves_cores_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [6]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(ValueError, match="an eager run"), half_of_the_threads():
        raise ValueError("an eager run that failed")
    assert threads == [6, 3, 6]
    threads[:] = [1]
    with half_of_the_threads():
        assert threads[-1] == 1


def test_golden_values_that_are_not_stored_as_computed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Golden(1, "float64", {}, {"loss/0/": np.array(0.5)}, {"loss/0/": 1e-6})
    package._write_golden(golden, tmp_path / "golden")
    monkeypatch.setattr(package, "read_golden", lambda path: Golden(1, "float64", {}, {"loss/0/": np.array(0.6)}, {}))
    with pytest.raises(InternalError, match="differ from the computed ones"):
        package._write_golden(golden, tmp_path / "golden")


def test_an_artifact_keeps_the_golden_values_of_its_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large tensor it keeps samples, but verification compares the whole tensor, once a step."""
    torch.manual_seed(0)
    model = nn.Linear(80, 60)
    inputs = {"x": torch.randn(2, 80), "y": torch.randn(2, 60)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    seen: list[Golden] = []

    def seeing(session: Session, golden: Golden, *, is_fresh: bool) -> Report:
        seen.append(golden)
        return golden_steps(session, golden, is_fresh=is_fresh)

    monkeypatch.setattr(expected_values, "golden_steps", seeing)
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    (golden,) = [g for g in seen if not g.about]
    assert golden.expected["state/1/weight"].shape == (60, 80)
    stored = read_golden(artifact.directory / "golden.safetensors")
    assert stored.expected["state/1/weight"].shape == (4096,)
    assert stored.allowed == kept(golden).allowed


@pytest.mark.parametrize(
    ("make", "takes_signs"),
    [
        (lambda p: torch.optim.Adam(p, lr=0.01), True),
        (lambda p: torch.optim.RMSprop(p, lr=0.01), True),
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), False),
    ],
)
def test_the_largest_change_of_a_parameter_is_kept_where_an_update_may_take_a_sign(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], takes_signs: bool
) -> None:
    model = nn.Linear(5, 3)
    inputs = {"x": torch.randn(4, 5), "y": torch.randn(4, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, make(model.parameters()), inputs)
    golden = next(oracle.golden_runs(capture(step), step_graph(step), 2))
    names = {f"state/{step}/{name}" for step in (1, 2) for name in ("weight", "bias")}
    assert golden.moves.keys() == (names if takes_signs else set())
    for key, most in golden.moves.items():
        before = model.get_parameter(key.split("/")[2]).detach().numpy()
        assert most == np.abs(golden.expected[key] - before).max() > 0.0


@pytest.mark.parametrize(("large", "steps"), [(10, 2), (1000, 3)])
def test_a_step_with_large_state_is_verified_over_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, steps: int
) -> None:
    monkeypatch.setattr(oracle, "LARGE", large)
    model = nn.Linear(5, 3)
    inputs = {"x": torch.randn(4, 5), "y": torch.randn(4, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.Adam(model.parameters()), inputs)
    report = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",), cache=False).reports["llvm-cpu"]
    assert report.steps == steps
    assert any(c.key == f"state/{steps}/weight" for c in report.comparisons)


def test_all_runs_are_made_for_a_target_that_cannot_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later verification gets the tolerances of all runs. Verification here needs the first run only."""
    monkeypatch.setattr(chosen_steps, "MOST", 0)
    model = nn.Linear(3, 2)
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    seeds: list[int | None] = []

    def seeing(captured: CapturedStep, graph: StepGraph, dtype: torch.dtype | None, *rest: Any, **more: Any) -> Skips:
        if dtype is None:
            seeds.append(rest[1])
        return run_eager(captured, graph, dtype, *rest, **more)

    def compiled() -> Artifact:
        seeds.clear()
        return ig.compile(step, tmp_path / "artifact", entry_points=("train_step",), cache=False)

    monkeypatch.setattr(oracle, "run_eager", seeing)
    assert compiled().reports["llvm-cpu"].passed
    assert seeds == [0]
    monkeypatch.setattr(package, "why_not", lambda *arguments: "it is for another machine")
    assert not compiled().reports
    assert seeds == [*range(NOISY_RUNS), None]


def runs_of(step: ig.TrainStep) -> list[Golden]:
    return list(oracle.golden_runs(capture(step), step_graph(step), 1))


@pytest.mark.parametrize(("precision", "error"), [("f32", 1e-4), ("bf16", 0.2)])
def test_noise_reaches_attention_over_padded_rows(precision: str, error: float) -> None:
    """PyTorch's fast path in evaluation makes nested tensors, to which no noise can be added.

    Under autocast on a CPU it fails, in all runs of the model in evaluation mode.
    """

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padded)

    torch.manual_seed(0)
    model = Encoder()
    padded = torch.tensor([[False, False, True], [False, False, False]])
    inputs = {"x": torch.randn(2, 3, 4), "padded": padded, "y": torch.randn(2, 3, 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, precision=precision)
    runs = runs_of(step)
    assert len(runs) == NOISY_RUNS + 1
    assert max(runs[-1].allowed.values()) < error


def step_of(model: nn.Module) -> ig.TrainStep:
    """A step of a model of three inputs and outputs."""
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def test_training_has_noise_where_evaluation_refuses_it() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if not self.training:
                h = h + nn.functional.binary_cross_entropy((x * 0 + 20).sigmoid(), torch.ones_like(x))
            return h

    torch.manual_seed(0)
    step = step_of(Model(3, 3))
    with pytest.warns(UserWarning, match=r"fails before eval/0/ if .* \(RuntimeError: all elements of input should be"):
        (golden,) = runs_of(step)  # evaluation has a value in the run without noise alone
    plain = oracle.Spread(oracle.Values(golden.expected))
    run_eager(capture(step), step_graph(step), None, 1, None, plain.record)
    assert golden.allowed["gradient/0/weight"] > 2 * plain.allowed("gradient/0/weight")


class Named(nn.Linear):
    """A layer that returns its output by name, beside the loss if it has a target."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = super().forward(x)
        return {"h": h} if y is None else {"h": 2 * h, "loss": (h - y).square().mean()}


def writing(output: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return (output["h"].sub_(y)).square().mean()


def writing_data(output: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Autograd and the counter of a tensor's versions notice nothing."""
    output["h"].data.mul_(3.0)
    return reading(output, y)


def reading(output: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return (output["h"] - y).square().mean()


@pytest.mark.parametrize("loss", [reading, writing, writing_data, None])
def test_prediction_takes_what_evaluation_has_computed(monkeypatch: pytest.MonkeyPatch, loss: Any) -> None:
    torch.manual_seed(0)
    model = Named(3, 2)
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, loss, optimizer, inputs, None if loss is None else ["x"])
    captured, graph, values = capture(step), step_graph(step), oracle.Values()
    monkeypatch.setattr(eager_inference, "PredictModule", None)
    run_eager(captured, graph, None, 1, None, values.record)
    with torch.no_grad():
        own = model.eval()(**{name: inputs[name] for name in captured.inference["predict"].inputs})["h"]
    np.testing.assert_array_equal(values.arrays["predict/0/h"], own.double().numpy())


class Inferring(nn.Linear):
    """A layer that also returns a tensor which has no counter of versions."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            doubled = x * 2
        return super().forward(x), doubled


class CountingCalls(nn.Linear):
    """A layer that also returns a buffer to which it adds, also in evaluation mode."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.register_buffer("calls", torch.zeros(outer))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1.0)
        return super().forward(x) + self.calls * 0.1, self.calls


@pytest.mark.parametrize("entry_points", [None, ("train_step", "predict")])
@pytest.mark.parametrize("kind", [Inferring, CountingCalls])
def test_any_tensor_may_be_an_output(tmp_path: Path, kind: Any, entry_points: Any) -> None:
    """What the model returns is what it was when it returned, whatever becomes of the tensor."""
    torch.manual_seed(0)
    model = kind(3, 2)
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda out, y: (out[0] - y).square().mean(), optimizer, inputs, ["x"])
    artifact = ig.compile(step, tmp_path / "out", entry_points=entry_points, cache=False)
    _, second = artifact.load().predict(x=inputs["x"].numpy()).values()
    with torch.no_grad():
        np.testing.assert_array_equal(second, model.eval()(inputs["x"])[1].numpy())


def test_a_run_at_rest_does_not_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Named(3, 2)
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    step = ig.TrainStep(model, reading, torch.optim.SGD(model.parameters(), lr=0.1), inputs, ["x"])
    captured, graph, recorded = capture(step), step_graph(step), list[str]()
    monkeypatch.setattr(eager_run, "record_inference", lambda *arguments: recorded.append("inference"))
    assert resting(captured, graph) is not None
    assert not recorded
    run_eager(captured, graph, None, 1, None, lambda key, tensor: None)
    assert recorded == ["inference"]


@pytest.mark.parametrize("is_left", [False, True])
def test_values_are_kept_of_any_tensor(is_left: bool) -> None:
    """Neither autograd's zeros nor a view of negated numbers has memory of its own that numpy could read."""
    values = oracle.Values(is_left=lambda key: is_left)
    values.record("zeros", torch._efficientzerotensor((3,), dtype=torch.float64))
    values.record("negated", torch._neg_view(torch.ones(2, dtype=torch.float64)))
    assert values.arrays["zeros"].tolist() == [0.0, 0.0, 0.0]
    assert values.arrays["negated"].tolist() == [-1.0, -1.0]


def test_what_a_later_step_may_change_is_copied() -> None:
    values, weight = oracle.Values(is_left=lambda key: key == "last"), torch.ones(2, dtype=torch.float64)
    values.record("first", weight)
    values.record("last", weight)
    weight += 1
    assert values.arrays["first"].tolist() == [1.0, 1.0]
    assert np.shares_memory(values.arrays["last"], weight.numpy())


def test_labels_that_are_converted_stay_probabilities_in_runs_with_noise() -> None:
    """A binary cross-entropy refuses targets above 1."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy(x.sigmoid(), (x > 0).float())

    flat = flat_function(loss, (torch.tensor([1.0, -1.0, 2.0, 3.0]),), gradients=False)
    assert len(list(golden_runs_of_function(flat, trace_function(flat, loss)))) == NOISY_RUNS + 1


def test_noise_may_move_values_out_of_the_domain_of_an_operator() -> None:
    """Noise moves probabilities above 1, which binary cross-entropy refuses."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy((x * 20).sigmoid(), (x > 0).float())

    flat = flat_function(loss, (torch.linspace(1.0, 3.0, 64),), gradients=False)
    with pytest.warns(UserWarning, match="tolerances come from one run"):
        *_, golden = golden_runs_of_function(flat, trace_function(flat, loss))
    assert all(0 < a < 1e-3 for a in golden.allowed.values())


def test_a_step_that_no_noisy_run_survives_says_that_its_tolerances_come_from_one_run() -> None:
    """A binary cross-entropy refuses probabilities of one if noise moves them."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if self.training:
                h = h + nn.functional.binary_cross_entropy((x * 0 + 20).sigmoid(), torch.ones_like(x))
            return h

    step = step_of(Model(3, 3))
    with pytest.warns(UserWarning, match=r"fails before loss/0/ if .* \(RuntimeError: all elements of input should be"):
        assert len(runs_of(step)) == 1
