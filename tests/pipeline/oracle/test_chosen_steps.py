"""Verification at chosen steps: learning rate 0, edges of hyperparameters, equal and extreme inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import Range
from irongrad.pipeline import driver
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.optimizer import optimizer_step
from irongrad.pipeline.oracle import eager_run
from irongrad.pipeline.oracle.chosen_steps import choices, chosen_steps, resting
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import Golden, Resting, are_same, key_of, read_golden, write_golden
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.verification import golden_steps


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: torch.Tensor) -> ig.TrainStep:
    given = inputs or {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, given)


def dense(kind: Any = torch.optim.Adam, **settings: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))
    return step_of(model, kind(model.parameters(), **settings))


def abouts(step: ig.TrainStep, *ranges: Range) -> list[str]:
    return [c.about for c in choices(step, driver.step_graph(step), ranges)]


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


def test_a_large_step_has_one_choice_for_all_inputs_and_another_where_eager_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("irongrad.pipeline.oracle.chosen_steps.LARGE", 10)
    step = dense()
    assert abouts(step, Range("y", 0, 2))[:2] == ["all of x 0.0 and all of y 0", "all of x 0.0"]
    made = chosen_steps(capture(step), driver.step_graph(step))
    assert [e.golden.about for e in made.expected] == ["all of x 0.0 and all of y 0"]
    (first,) = made.expected
    assert not first.golden.inputs["x"].any()
    assert not first.golden.inputs["y"].any()
    step = replace(step, loss=lambda out, y: nn.functional.cross_entropy(out, y) / (y.sum() * out.std()).sign())
    made = chosen_steps(capture(step), driver.step_graph(step))
    assert [e.golden.about for e in made.expected] == ["all of x 0.0"]
    assert made.skipped[0].startswith("all of x 0.0 and all of y 0: ")
