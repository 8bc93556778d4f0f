"""Verification at chosen steps: learning rate 0, edges of hyperparameters, equal and extreme inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import Range
from irongrad.pipeline import driver
from irongrad.pipeline.capture.capture import CapturedStep, capture
from irongrad.pipeline.optimizer import optimizer_step
from irongrad.pipeline.oracle import background_runs, eager_run, oracle
from irongrad.pipeline.oracle import chosen_steps as choices
from irongrad.pipeline.oracle.chosen_steps import chosen_steps, hyper_choices, input_choices, own_and_chosen
from irongrad.pipeline.oracle.eager_run import Variant
from irongrad.pipeline.oracle.steps_at_rest import resting
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import Golden, Resting, are_same, key_of, read_golden, write_golden
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.verification import golden_steps, verify


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: torch.Tensor) -> ig.TrainStep:
    given = inputs or {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, given)


def dense(kind: Any = torch.optim.Adam, **settings: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))
    return step_of(model, kind(model.parameters(), **settings))


def abouts(step: ig.TrainStep, *ranges: Range) -> list[str]:
    graph = driver.step_graph(step)
    return [c.about for c in (*input_choices(step, graph, ranges), *hyper_choices(step, graph))]


def test_an_update_that_divides_by_the_learning_rate_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The capturable form of Adam gives NaN at a learning rate of 0 for a gradient of 0."""
    monkeypatch.setattr(optimizer_step, "_BRANCHING", (torch.optim.Adam,))
    with pytest.raises(VerificationError, match="gradients=0, lr=0") as caught:
        ig.compile(dense(), tmp_path / "out", cache=False)
    assert "error inf" in str(caught.value)


def test_a_step_at_rest_passes_and_the_report_says_what_was_chosen(tmp_path: Path) -> None:
    artifact = ig.compile(dense(torch.optim.SGD, momentum=0.9, weight_decay=0.1), tmp_path / "out", cache=False)
    report = artifact.reports["llvm-cpu"]
    assert report.chosen == ("all of x 0.0", "all of y 0", "all of y 2", "momentum = 0", "weight_decay = 0")
    assert report.skipped == ()
    entries = {c.entry_point for c in report.comparisons}
    assert entries > {"train_step, lr=0", "apply_step, gradients=0", "train_steps, train_step"}
    golden = read_golden(artifact.directory / "golden.safetensors")
    assert golden.resting == Resting({"lr": 0.0, "weight_decay": 0.0})


def test_a_hyperparameter_that_is_wrong_at_its_edge_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = eager_run._set_hypers
    monkeypatch.setattr(eager_run, "_set_hypers", lambda step, v: None if "momentum" in v else plain(step, v))
    # A single step shows a wrong weight decay, but no wrong momentum.
    monkeypatch.setattr(eager_run, "_set_hypers", lambda step, v: None if len(v) == 1 else plain(step, v))
    step = dense(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
    with pytest.raises(VerificationError, match="at weight_decay = 0 in "):
        ig.compile(step, tmp_path / "out", entry_points=("train_step",), cache=False)


class Tied(nn.Module):
    """A ReLU whose gradient at 0 is 1 in the exported program and 0 in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5, bias=False), nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) + self.gain
        exported = torch.compiler.is_exporting()
        return self.outer(torch.where(hidden >= 0, hidden, 0.0) if exported else torch.relu(hidden))


def test_another_gradient_at_a_tie_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    step = step_of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(VerificationError, match="at all of x 0.0 in ") as caught:
        ig.compile(step, tmp_path / "out", cache=False)
    assert "gradient/0/gain" in str(caught.value)


def test_every_kind_of_input_has_its_choices() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3)

        def forward(self, i: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (self.table(i) * x).masked_fill(mask[..., None], 0.0).sum(1) * keep.sum()

    model = Model()
    mask = torch.tensor([[True, False], [False, True]])
    inputs = {"i": torch.tensor([[1, 2], [3, 4]]), "mask": mask, "keep": torch.tensor([1, 0]), "x": torch.ones(2, 2, 3)}
    step = ig.TrainStep(model, lambda y: y.sum(), torch.optim.Adam(model.parameters()), inputs)
    found = abouts(step, Range("i", 0, 8))
    assert {t for t in found if " i " in t} == {"all of i 0", "all of i 8"}
    assert {t for t in found if " mask " in t} == {
        "all of mask False",
        "all of mask True",
        "the first row of mask False",
        "the first row of mask True",
    }
    assert {t for t in found if " keep " in t} == {"all of keep 0", "all of keep 1", "the first row of keep 0"}
    assert {t for t in found if " x " in t} == {"all of x 0.0", "the first row of x 0.0"}
    assert found[-2:] == ["beta1 = 0", "beta2 = 0"]
    assert "all of i 1" in abouts(step)  # without a range, the extremes of the example


def test_a_choice_that_eager_does_not_survive_is_skipped_with_the_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).norm() / x.sum()

    model = Model()
    step = ig.TrainStep(model, lambda y: y, torch.optim.SGD(model.parameters()), {"x": torch.rand(3) + 0.2})
    chosen = chosen_steps(capture(step), driver.step_graph(step))
    assert chosen.expected == ()
    assert len(chosen.skipped) == 1
    assert chosen.skipped[0].startswith("all of x 0.0: eager gives NaN or infinity, in ")


def test_a_choice_at_which_eager_breaks_a_parameter_is_skipped() -> None:
    """The gradients are compared there, and not what the update makes of them; but it must stay finite."""

    class Normalised(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=self.param_groups[0]["lr"])

    model = nn.Linear(4, 3)
    step = step_of(model, Normalised(model.parameters(), {"lr": 0.1}))
    skipped = chosen_steps(capture(step), driver.step_graph(step)).skipped
    assert skipped == ("all of x 0.0: eager gives NaN or infinity, in state/1/weight",)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (True, "rounding decides whether an optimizer's square of gradient/0/1.bias is infinite"),
        (False, "eager gives NaN or infinity, in state/1/optimizer/exp_avg_sq/1.bias"),
    ],
)
def test_a_choice_at_which_rounding_errors_have_infinite_squares_is_skipped(records: bool, reason: str) -> None:
    """A BatchNorm over zeros multiplies the rounding errors of gradients by up to 316, twenty of them beyond float32.

    Gradients are recorded if an entry point returns them.
    """
    torch.manual_seed(0)
    layers = [(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.Hardswish()) for _ in range(20)]
    model = nn.Sequential(*chain.from_iterable(layers), nn.Flatten(), nn.Linear(128, 3))
    inputs = {"x": torch.randn(4, 2, 8, 8), "y": torch.randint(0, 3, (4,))}
    step = step_of(model, torch.optim.Adam(model.parameters()), **inputs)
    graph = driver.step_graph(step)
    if not records:
        functions = {name: function for name, function in graph.functions.items() if name != "accumulate"}
        graph = replace(graph, functions=functions)
    assert f"all of x 0.0: {reason}" in chosen_steps(capture(step), graph).skipped


def test_a_parameter_that_eager_moves_at_a_learning_rate_of_zero_may_move() -> None:
    step = dense()

    def shrink(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        with torch.no_grad():
            step.model[0].weight.mul_(0.9)

    step.optimizer.register_step_post_hook(shrink)
    captured, graph = capture(step), driver.step_graph(step)
    before = step.model[0].weight.clone()
    found = resting(captured, graph)
    assert (found.moving, found.unbounded) == (("0.weight",), ())
    assert torch.equal(step.model[0].weight, before)


def test_golden_values_keep_the_resting_hyperparameters(tmp_path: Path) -> None:
    golden = Golden(1, "float64", {}, {}, {}, resting=Resting({"lr": 0.0}, ("w",), ("v",)))
    write_golden(golden, tmp_path / "golden")
    assert read_golden(tmp_path / "golden").resting == golden.resting
    assert are_same(read_golden(tmp_path / "golden"), golden)
    assert not are_same(golden, replace(golden, resting=Resting({"lr": 0.0}, ("w",))))


def test_many_steps_that_differ_from_single_ones_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lies within its bound, on another side of the golden value."""
    artifact = ig.compile(dense(), tmp_path / "out", entry_points=("train_step", "train_steps"), cache=False)
    session, key = artifact.load(), key_of("loss", 0)
    golden = read_golden(artifact.directory / "golden.safetensors")
    allowed, call = golden.allowed[key], session.call
    shifted = replace(golden, expected=golden.expected | {key: golden.expected[key] + 0.7 * allowed})
    monkeypatch.setattr(session, "call", lambda e, i: [a + 1.4 * allowed * (e == "train_steps") for a in call(e, i)])
    found = {c.entry_point: c.ratio <= 1 for c in golden_steps(session, shifted).comparisons if c.key == key}
    assert found == {"train_step": True, "train_steps": True, "train_steps, train_step": False}


class AtItsEdge(nn.Module):
    """Casts values next to whole numbers to integers, so a rounding error changes the result by one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * 10).to(torch.int64).to(x.dtype) - torch.round(x * 10)) @ self.w


def test_a_cast_at_its_edge_is_said_to_be_unjudged(tmp_path: Path) -> None:
    model = AtItsEdge()
    x = (torch.arange(1, 33).reshape(8, 4) % 9 + 1) / 10
    step = ig.TrainStep(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), {"x": x, "y": torch.ones(8, 3)}
    )
    artifact = ig.compile(step, tmp_path / "out", cache=False)
    assert "gradient/0/w" in artifact.manifest.targets[0].certificate.unjudged
    assert read_manifest(artifact.directory).targets[0].certificate.unjudged
    good = ig.compile(dense(), tmp_path / "good", cache=False)
    assert good.manifest.targets[0].certificate.unjudged == ()


def test_gradients_that_nothing_clears_are_those_of_each_step(tmp_path: Path) -> None:
    ig.compile(dense(), tmp_path / "step", entry_points=("grad_step", "export_gradients"))


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("chosen_steps", "steps_at_rest", "oracle"):
        monkeypatch.setattr(f"irongrad.pipeline.oracle.{module}.LARGE", 10)


@pytest.mark.usefixtures("all_are_large")
def test_a_large_step_has_one_choice_for_all_inputs_and_another_where_eager_breaks() -> None:
    step = dense()
    assert abouts(step, Range("y", 0, 2))[:2] == ["all of x 0.0 and all of y 0", "all of x 0.0"]
    own, chosen = own_and_chosen(capture(step), driver.step_graph(step), 3)
    assert (own.golden.about, own.golden.steps, chosen.expected) == ("all of x 0.0 and all of y 0", 2, ())
    assert not own.golden.later["x"].any()
    assert not own.golden.later["y"].any()
    assert torch.equal(torch.from_numpy(own.golden.inputs["x"]), step.inputs["x"])
    step = replace(step, loss=lambda out, y: nn.functional.cross_entropy(out, y) / (y.sum() * out.std()).sign())
    own, chosen = own_and_chosen(capture(step), driver.step_graph(step), 3)
    assert own.golden.about == "all of x 0.0"
    assert chosen.skipped[0].startswith("all of x 0.0 and all of y 0: ")


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_gradient_that_shows_in_no_moment_has_a_step_at_its_own_learning_rate(kind: Any) -> None:
    step = dense(kind, lr=0.01)
    own, chosen = own_and_chosen(capture(step), driver.step_graph(step), 3)
    assert (own.golden.about, own.golden.first_hypers, own.golden.later) == ("", {}, {})
    assert [e.golden.about for e in chosen.expected] == ["all of x 0.0 and all of y 0"]


@pytest.mark.usefixtures("all_are_large")
def test_the_second_step_of_a_large_one_takes_chosen_inputs_everywhere(tmp_path: Path) -> None:
    artifact = ig.compile(dense(torch.optim.SGD, momentum=0.9), tmp_path / "out", cache=False)
    report = artifact.reports["llvm-cpu"]
    assert report.chosen == ("all of x 0.0 and all of y 0",)
    found = {(c.entry_point, c.key) for c in report.comparisons}
    assert found > {
        ("train_step", "loss/1/"),
        ("train_step", "state/2/0.weight"),
        ("train_steps, train_step", "loss/1/"),
        ("eval_step", "eval/1/"),
        ("predict", "predict/1/output"),
        ("grad_step", "gradient/1/0.weight"),
        ("train_step, lr=0", "state/0/0.weight"),
        ("apply_step, gradients=0", "state/0/optimizer/momentum_buffer/0.weight"),
    }
    golden = read_golden(artifact.directory / "golden.safetensors")
    assert golden.inputs["x"].any()
    assert not golden.later["x"].any()
    assert verify(artifact.load(), {"": golden}).passed
    assert not verify(artifact.load(), {"": replace(golden, later={})}).passed


@pytest.mark.usefixtures("all_are_large")
def test_a_value_that_is_wrong_only_at_the_choice_of_a_large_step_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    step = step_of(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    with pytest.raises(VerificationError, match=r"at all of x 0\.0 and all of y 0 in the second step in ") as caught:
        ig.compile(step, tmp_path / "out", cache=False)
    assert "gradient/1/gain" in str(caught.value)


class WithoutGradient(nn.Module):
    """Loses a gradient in the exported program, unless its input is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        lost = x.abs().sum().clamp(max=1.0) if torch.compiler.is_exporting() else torch.zeros(())
        return h.detach() * lost + h * (1 - lost)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("entry_points", [("train_step",), None])
def test_a_gradient_that_is_wrong_only_at_the_example_of_a_large_step_is_found(
    tmp_path: Path, entry_points: Any
) -> None:
    torch.manual_seed(0)
    model = WithoutGradient()
    step = step_of(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(VerificationError) as caught:
        ig.compile(step, tmp_path / "out", entry_points=entry_points, cache=False)
    assert "state/1/optimizer/exp_avg/inner.weight" in str(caught.value)


@pytest.mark.usefixtures("all_are_large")
def test_a_huge_step_shows_the_gradient_of_its_example_in_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_run, "HUGE", 0)
    torch.manual_seed(0)
    model = WithoutGradient()
    step = step_of(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(VerificationError) as caught:
        ig.compile(step, tmp_path / "out", entry_points=("train_step",), cache=False)
    assert "state/2/optimizer/exp_avg/inner.weight" in str(caught.value)
    assert "state/1" not in str(caught.value)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("wrong", [{"lr": 0.0101}, {"weight_decay": 0.11}, {"betas": (0.9, 0.998)}, {"eps": 1e-5}])
def test_another_update_of_a_huge_step_is_found(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle takes another hyperparameter than the compiled step: the last state alone has to show it."""
    monkeypatch.setattr(eager_run, "HUGE", 0)
    settings = {"lr": 0.01, "weight_decay": 0.1}
    step, plain = dense(torch.optim.AdamW, **settings), background_runs.own_and_chosen

    def other(captured: CapturedStep, *rest: Any) -> object:
        optimizer = torch.optim.AdamW(step.model.parameters(), **{**settings, **wrong})
        return plain(replace(captured, step=replace(captured.step, optimizer=optimizer)), *rest)

    monkeypatch.setattr(background_runs, "own_and_chosen", other)
    with pytest.raises(VerificationError):
        ig.compile(step, tmp_path / "out", entry_points=("train_step",), cache=False)


@pytest.mark.usefixtures("all_are_large")
def test_a_large_step_that_divides_by_the_learning_rate_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optimizer_step, "_BRANCHING", (torch.optim.Adam,))
    with pytest.raises(VerificationError, match="gradients=0, lr=0"):
        ig.compile(dense(), tmp_path / "out", cache=False)


@pytest.mark.usefixtures("all_are_large")
def test_state_that_eager_fills_with_infinity_in_a_large_step_may_be_infinite(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("least", torch.full((3,), -float("inf")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.least.add_(x.mean())
            return self.inner(x)

    model = Counting()
    step = step_of(model, torch.optim.Adam(model.parameters()))
    own, _ = own_and_chosen(capture(step), driver.step_graph(step), 3)
    assert own.golden.resting is not None
    assert set(own.golden.resting.unbounded) == {"least"}
    ig.compile(step, tmp_path / "out", cache=False)


@pytest.mark.usefixtures("all_are_large")
def test_state_that_is_infinite_after_the_first_step_of_a_large_one_may_be_infinite(tmp_path: Path) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_((x.detach() == 0).float().mean().log().expand(3))
            return self.inner(x)

    model = Last()
    step = step_of(model, torch.optim.Adam(model.parameters()))
    artifact = ig.compile(step, tmp_path / "out", cache=False)
    assert artifact.reports["llvm-cpu"].chosen == ("all of x 0.0 and all of y 0",)


class OwnNormalisation(nn.Module):
    """What nn.BatchNorm1d computes in training, written by a user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, 0, correction=0)
        return (x - mean) * torch.rsqrt(variance + 1e-5)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(("normalisation", "joined"), [(partial(nn.BatchNorm1d, 8), 0), (OwnNormalisation, 1)])
def test_a_choice_at_which_rounding_decides_the_updates_is_compared_by_itself(
    normalisation: Callable[[], nn.Module], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[bool] = []

    def runs(*arguments: Any) -> Iterator[Golden]:
        later.extend(bool(a.later) for a in arguments if isinstance(a, Variant))
        return oracle.golden_runs(*arguments)

    monkeypatch.setattr(choices, "golden_runs", runs)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(n, 8), normalisation(), nn.ReLU()) for n in (4, 8, 8)]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    step = step_of(model, torch.optim.Adam(model.parameters()))
    own, chosen = own_and_chosen(capture(step), driver.step_graph(step), 3)
    assert (own.golden.about, own.golden.later, chosen.skipped) == ("", {}, ())
    assert len(chosen.expected) == 1
    assert sum(later) == joined
