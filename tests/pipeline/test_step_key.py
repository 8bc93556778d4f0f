"""Everything that goes into an artifact is in its key, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes import PassResult
from irongrad.passes.graph.rematerialise import Rematerialise
from irongrad.pipeline import step_key
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.described_values import UnknownValueError, described
from irongrad.pipeline.options import Options, make_options
from irongrad.targets import parse_target


class Net(nn.Module):
    """Everything that a key has to see: attributes of Python, a constant tensor, a buffer, dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(4))
        self.power = 2
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(x)) ** self.power
        return self.last(hidden * self.scale + self.table)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class WithFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Identity.apply(super().forward(x))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def make_step(
    change: Callable[[Any], Any] = lambda model: None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    kind: type[Net] = Net,
    **options: Any,
) -> ig.TrainStep:
    torch.manual_seed(0)
    model = kind()
    inputs = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    change(model)
    return ig.TrainStep(
        **{"model": model, "loss": nn.functional.mse_loss, "optimizer": optimizer(model), "inputs": inputs, **options}
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return make_options(tmp_path_factory.mktemp("keys") / "out")


@pytest.fixture(scope="module")
def plain(options: Options) -> str:
    return key(make_step(), options)


def key(step: ig.TrainStep, options: Options) -> str | None:
    return step_key.step_key(capture(step), options, 3)


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def grouped(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.first.parameters()}, {"params": model.last.parameters()}], lr=0.1)


def tie(model: Net) -> None:
    with torch.no_grad():
        model.last.weight.copy_(model.first.weight)


def really_tie(model: Net) -> None:
    model.last.weight = model.first.weight


def nudge(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] += 1e-6


CHANGED = {
    "a parameter": lambda: make_step(lambda m: nudge(m.first.weight)),
    "a buffer": lambda: make_step(lambda m: nudge(m.scale)),
    "a constant": lambda: make_step(lambda m: nudge(m.table)),
    "an attribute": lambda: make_step(lambda m: setattr(m, "power", 3)),
    "dropout": lambda: make_step(lambda m: setattr(m.drop, "p", 0.2)),
    "dropout in evaluation mode": lambda: make_step(lambda m: m.drop.eval()),
    "a frozen parameter": lambda: make_step(lambda m: m.first.weight.requires_grad_(False)),
    "an input": lambda: make_step(inputs={"x": torch.ones(4, 4), "y": torch.ones(4, 4)}),
    "the order of inputs": lambda: reversed_inputs(make_step()),
    "the loss": lambda: make_step(loss=nn.functional.l1_loss),
    "the optimizer": lambda: make_step(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1)),
    "the learning rate": lambda: make_step(optimizer=lambda m: sgd(m, lr=0.2)),
    "momentum": lambda: make_step(optimizer=lambda m: sgd(m, momentum=0.9)),
    "optimizer state": lambda: make_step(optimizer=with_momentum),
    "parameter groups": lambda: make_step(optimizer=grouped),
    "clipping": lambda: make_step(clip_grad_norm=1.0),
    "clipping by value": lambda: make_step(clip_grad_value=1.0),
    "the seed": lambda: make_step(seed=1),
    "precision": lambda: make_step(precision="bf16"),
    "a loss scale": lambda: make_step(loss_scale=8.0),
    "a dynamic loss scale": lambda: make_step(loss_scale=torch.amp.GradScaler("cpu")),
    "another dynamic loss scale": lambda: make_step(loss_scale=torch.amp.GradScaler("cpu", growth_interval=7)),
    "accumulation": lambda: make_step(accumulate=2),
    "equal weights": lambda: make_step(tie),
    "tied weights": lambda: make_step(really_tie),
}


def reversed_inputs(step: ig.TrainStep) -> ig.TrainStep:
    return replace(step, inputs=dict(reversed(step.inputs.items())))


def test_the_same_step_has_the_same_key(options, plain):
    assert plain is not None
    assert key(make_step(), options) == plain
    assert key(copy.deepcopy(make_step()), options) == plain
    assert key(make_step(), replace(options, output=options.output / "elsewhere")) == plain


def test_a_step_with_operators_of_the_package_has_a_key(options):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    assert key(make_step(kind=Recurrent), options) is not None


def test_every_change_of_the_step_changes_its_key(options, plain):
    found = {name: key(make(), options) for name, make in CHANGED.items()}
    assert None not in found.values()
    assert len({plain, *found.values()}) == len(CHANGED) + 1, found


class AtLeast(Net):
    """Takes a Python decision on a size, with a number that is in no graph."""

    least = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self.least:
            return super().forward(x) * 0
        return super().forward(x)


def varying(least: int = 2, size: int = 4, **options: Any) -> ig.TrainStep:
    given = {"dynamic": {"x": {0: "B"}, "y": {0: "B"}}, "inputs": {n: torch.ones(size, 4) for n in "xy"}}
    return make_step(lambda model: setattr(model, "least", least), kind=AtLeast, **{**given, **options})


def test_every_change_of_sizes_that_vary_changes_the_key(options):
    whole, part = {"x": {0: "B"}, "y": {0: "B"}}, {"x": {0: "N"}, "y": {0: "N"}}
    steps = {
        "any size": lambda: varying(),
        "a larger example": lambda: varying(size=5),
        "a decision on a size": lambda: varying(least=3),
        "another name": lambda: varying(dynamic=part),
        "buckets": lambda: varying(buckets={"B": [4, 8]}),
        "other buckets": lambda: varying(buckets=[{"B": 4}, {"B": 9}]),
        "sizes above them": lambda: varying(buckets={"B": [4, 8]}, bucket_fallback="dynamic"),
        "a constraint": lambda: varying(constraints=["B <= 9"]),
        "fixed sizes": lambda: varying(dynamic={}),
    }
    assert key(varying(dynamic=whole), options) == key(varying(), options)
    found = {name: key(make(), options) for name, make in steps.items()}
    assert None not in found.values()
    assert len(set(found.values())) == len(steps), found


def test_the_line_of_an_operator_is_in_the_key(options):
    """The artifact holds the line too."""
    source = "\n\ndef loss(a, b):\n    return (a - b).square().mean()\n"
    first, later = {}, {}
    exec(compile(source, "mine.py", "exec"), first)
    exec(compile("\n" + source, "mine.py", "exec"), later)
    assert key(make_step(loss=first["loss"]), options) != key(make_step(loss=later["loss"]), options)


def test_every_option_changes_the_key(options):
    captured = capture(make_step())
    changes = (
        {},
        {"targets": (parse_target("llvm-cpu:cpu=x86-64-v3"),)},
        {"passes": options.passes[:-1]},
        {"passes": (*options.passes, Rematerialise("50%"))},  # the form in which `max_memory` adds it
        {"disabled_module_passes": ("drop-index-checks",)},
        {"tune": True},
        {"route": "stablehlo"},
        {"entry_points": ("train_step",)},
        {"entry_points": ("train_step", "predict")},
    )
    found = [step_key.step_key(captured, replace(options, **change), 3) for change in changes]
    found.append(step_key.step_key(captured, options, 4))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(step_key, "version", lambda package: "0.0.1"),
        lambda patch: patch.setattr(step_key, "sources", lambda: "other"),
        lambda patch: patch.setattr(step_key, "host", lambda: "other"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    ],
)
def test_versions_sources_and_the_machine_change_the_keys(change, options, monkeypatch):
    captured = capture(make_step())
    before = step_key.step_key(captured, options, 3)
    change(monkeypatch)
    assert step_key.step_key(captured, options, 3) != before


class MySGD(torch.optim.SGD):
    pass


@dataclass(frozen=True)
class Foreign:
    name: ClassVar[str] = "foreign"

    def run(self, graph: Any, context: Any) -> PassResult:
        return PassResult(False)


def hooked_step() -> ig.TrainStep:
    step = make_step()
    step.optimizer.register_step_pre_hook(lambda *arguments: None)
    return step


UNKNOWN = {
    "an optimizer of one's own": lambda: make_step(optimizer=lambda m: MySGD(m.parameters(), lr=0.1)),
    "a hook of an optimizer": hooked_step,
    "a hook of a parameter": lambda: make_step(lambda m: m.first.weight.register_hook(lambda g: g * 2)),
    "a backward of one's own": lambda: make_step(kind=WithFunction),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_step_that_runs_other_python_after_capture_has_no_key(name, options, monkeypatch):
    monkeypatch.setattr("irongrad.operators.decompositions.registry._USER", {})
    assert key(UNKNOWN[name](), options) is None


def test_a_pass_of_another_package_has_no_key(options):
    captured = capture(make_step())
    assert step_key.step_key(captured, replace(options, passes=(Foreign(),)), 3) is None


def test_a_users_decomposition_has_no_key(options, monkeypatch):
    captured = capture(make_step())
    monkeypatch.setattr("irongrad.operators.decompositions.registry._USER", {torch.ops.aten.mm.default: None})
    assert step_key.step_key(captured, options, 3) is None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_an_autograd_function_removes_the_key_of_its_own_step_only(options):
    class Doubling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(super().forward(x))

    assert key(make_step(kind=Doubling), options) is None
    assert key(make_step(), options) is not None


def test_different_values_have_different_descriptions_and_functions_none():
    with pytest.raises(UnknownValueError, match="function"):
        described([lambda: None])
    values = [1, 1.0, True, "1", None, [1], (1,), {1: 1}, torch.ones(1), torch.ones(1, 1), torch.ones(1).double()]
    assert len({repr(described(v)) for v in values}) == len(values)


def test_a_field_added_later_is_in_the_key(options):
    """A field of a step or of the options. If the key left it out, the cache would return another step's artifact."""

    @dataclass(frozen=True)
    class Later(ig.TrainStep):
        later: tuple[int, ...] = ()

    @dataclass(frozen=True)
    class LaterOptions(Options):
        later: object = None

    captured = capture(make_step())
    plain = {f: getattr(captured.step, f) for f in captured.step.__dataclass_fields__}
    steps = [replace(captured, step=Later(**plain, later=value)) for value in ((), (1,), (2,))]
    found = {step_key.step_key(c, options, 3) for c in steps}
    assert len(found) == 3
    chosen = {f: getattr(options, f) for f in options.__dataclass_fields__}
    found = [step_key.step_key(captured, LaterOptions(**chosen, later=value), 3) for value in (None, 1, object())]
    assert len(set(found)) == 3
    assert found[-1] is None
