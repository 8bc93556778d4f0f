"""Optimizers from outside torch.optim train as in eager, whatever their state is and wherever they keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.optimizer import branches
from irongrad.runtime.errors import CaptureError


class Own(torch.optim.Optimizer):
    """A user's optimizer; subclasses define the update of one parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.scale = 0.5

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Attribute(Own):
    def update(self, p, state, group):
        p.add_(p.grad.sign(), alpha=-group["lr"] * self.scale)


class LazyMean(Own):
    def update(self, p, state, group):
        if not state:
            state["mean"] = torch.zeros_like(p)
        state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.add_(state["mean"], alpha=-group["lr"])


class StartsAsGradient(Own):
    def update(self, p, state, group):
        if "mean" not in state:
            state["mean"] = torch.clone(p.grad)
        else:
            state["mean"].mul_(0.9).add_(p.grad)
        p.add_(state["mean"], alpha=-group["lr"])


class Factored(Own):
    """Keeps the mean as an outer product, as Adalite does."""

    def update(self, p, state, group):
        matrix = p.reshape(len(p), -1)
        if not state:
            state["row"], state["column"] = torch.zeros(1, matrix.shape[1]), torch.zeros(len(p), 1)
        mean = (state["column"] @ state["row"]).lerp(p.grad.reshape_as(matrix), 0.1)
        state["row"], state["column"] = mean.mean(0, keepdim=True), mean.mean(1, keepdim=True)
        p.add_(mean.reshape_as(p), alpha=-group["lr"])


class Counted(Own):
    def update(self, p, state, group):
        if len(state) == 0:
            state.update(step=0, mean=torch.zeros_like(p))
        state["step"] += 1
        state["mean"].lerp_(p.grad, 0.2)
        correction = math.sqrt(1 - 0.8 ** state["step"])
        p.data.add_(state["mean"], alpha=-group["lr"] / max(correction, 1e-3))


class AsksForFloats(Own):
    def update(self, p, state, group):
        assert isinstance(group["lr"], float)
        assert isinstance(group["lr"], (int, float))
        rate = torch.empty(()).fill_(group["lr"]) if isinstance(group["lr"], float) else group["lr"]
        held = torch.where(p.grad > 0, p.grad, group["lr"]).masked_fill(p.grad.abs() < 1e-3, group["lr"])
        p.sub_((held + torch.remainder(p.grad, group["lr"])) * rate * float("0.5"))


class WarmsUp(Own):
    def update(self, p, state, group):
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 2:
            p.add_(p.grad, alpha=-group["lr"])
        else:
            p.add_(p.grad.sign(), alpha=-0.01 * state["step"])


class OfGroup(Own):
    def update(self, p, state, group):
        group.setdefault("k", 0)
        p.sub_(p.grad * (group["lr"] / (1 + group["k"])))
        group["k"] += 1


class CountsInItsDefaults(Own):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.param_groups[0]["k"] = 0

    def update(self, p, state, group):
        p.sub_(p.grad * (group["lr"] / (1 + group["k"])))
        group["k"] += 1


class TensorOfGroup(Own):
    def update(self, p, state, group):
        if "weight_sum" not in group:
            group["weight_sum"] = torch.tensor(0.0)
        group["weight_sum"].add_(p.grad.abs().mean())
        p.sub_(p.grad / (1 + group["weight_sum"]))


class Nested(Own):
    def update(self, p, state, group):
        if not state:
            state["factors"] = [torch.zeros_like(p), {"second": torch.ones_like(p)}]
        first, held = state["factors"]
        first.mul_(0.9).add_(p.grad)
        held["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        p.addcdiv_(first, held["second"].sqrt().add_(1e-3), value=-group["lr"])


class ForEach(Own):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = torch._foreach_mul([p.grad for p in parameters], 0.5)
            norms = torch._foreach_norm(gradients)
            torch._foreach_div_(gradients, torch._foreach_add(norms, 1.0))
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])


class DecidesOnGradients(Own):
    def update(self, p, state, group):
        largest = p.grad.abs().max()
        if largest > 0.1:
            p.add_(p.grad / largest, alpha=-group["lr"])
        else:
            p.add_(p.grad, alpha=-group["lr"])


class CallsItsBase(torch.optim.SGD):
    """A subclass of an optimizer of torch that centralises gradients and lets the rate decay."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.mean(-1, keepdim=True))
        super().step()
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9


class SlowBuffer(Own):
    """As Lookahead: the buffer starts as the parameter, after its first update."""

    def update(self, p, state, group):
        p.add_(p.grad, alpha=-group["lr"])
        if "slow" not in state:
            state["slow"] = torch.empty_like(p)
            state["slow"].copy_(p)
        state["slow"].lerp_(p, 0.5)
        p.copy_(state["slow"])


class InAList(Own):
    def update(self, p, state, group):
        if not state:
            state["history"] = []
            state["history"].append(torch.zeros_like(p))
        state["history"][0].add_(p.grad)
        p.sub_(state["history"][0], alpha=group["lr"])


class OnlyRemembersAtFirst(Own):
    def update(self, p, state, group):
        if not state:
            state["before"] = torch.full_like(p, 2.0)
            state["is_ready"] = True
            return
        p.sub_(state["before"] * p.grad, alpha=group["lr"])


class SumInDefaults(Own):
    """As schedule-free: its sums begin in the defaults of the groups, and the first weight may be zero."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.defaults |= {"weight_sum": 0.0, "largest": -1.0}
        self.param_groups[0].update(weight_sum=0.0, largest=-1.0, k=0)

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["largest"] = max(group["largest"], group["lr"])
            weight = group["largest"] ** 2 * min(group["k"], 1)
            group["weight_sum"] = group["weight_sum"] + weight
            try:
                share = weight / group["weight_sum"]
            except ZeroDivisionError:
                share = 0.0
            for p in group["params"]:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p.detach())
                p.data.lerp_(self.state[p]["z"], weight=share)
                self.state[p]["z"].sub_(p.grad, alpha=group["lr"])
                p.data.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
            group["k"] += 1


class ConstantsInItsStep(Own):
    def update(self, p, state, group):
        factors = torch.tensor([0.5, 1.0]).sum() * torch.as_tensor(2.0)
        least, gradient = p.grad.abs().mean(), torch.empty_like(p)
        torch.mul(p.grad, factors.clamp_min_(least), out=gradient)
        alike = nn.functional.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0, eps=1e-6)
        p.sub_(gradient * (1 + alike), alpha=group["lr"])


class DecidesForEachParameter(Own):
    def update(self, p, state, group):
        weight, gradient = p.norm(), p.grad.norm()
        trust = (weight / gradient).clamp(max=1.0) if weight != 0 and gradient > 0.1 else 1.0
        state["trust"] = trust  # a number or a tensor
        state["sum"] = state.get("sum", 0.0) + p.grad.sum().reshape(1)  # a number that becomes a tensor
        if not torch.allclose(p, p.grad):
            p.sub_(p.grad * trust, alpha=group["lr"])


class OtherRuleAtZero(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.defaults["decay"] = self.param_groups[0]["decay"] = 0.0

    def update(self, p, state, group):
        gradient = p.grad / p.grad.norm() if group["decay"] != 0 else p.grad
        p.sub_(gradient + group["decay"] * p, alpha=group["lr"])


class KeyedByHyperparameter(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.defaults["betas"] = self.param_groups[0]["betas"] = (0.0, 0.9)

    def update(self, p, state, group):
        means = state.setdefault("means", {beta: torch.zeros_like(p) for beta in group["betas"]})
        for beta in group["betas"]:
            means[beta].mul_(beta).add_(p.grad)
            p.sub_(means[beta], alpha=group["lr"] / 2)


class Projector:
    def __init__(self, size: int) -> None:
        self.size, self.basis = size, None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(gradient) / self.size if self.basis is None else self.basis * 0.9
        self.basis = scale
        return gradient * scale


class KeepsObjects(Own):
    """As GaLore: the object is made in the first step, and so is its basis."""

    def update(self, p, state, group):
        projector = state.setdefault("projector", Projector(p.shape[0]))
        p.sub_(projector.project(p.grad)[: projector.size], alpha=group["lr"])


class RemembersNorm(Own):
    """A first step compares a norm with itself: rounding must not decide."""

    def update(self, p, state, group):
        norm = p.norm()
        if "norm" not in state:
            state["norm"] = norm
        p.sub_(p.grad, alpha=group["lr"] * (0.1 if norm > state["norm"] else 1.0))
        state["norm"].copy_(norm)


class OtherRuleAtZeroLater(Own):
    """As SM3: at zero the second step is another, not the first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.defaults["beta"] = self.param_groups[0]["beta"] = 0.0

    def update(self, p, state, group):
        largest = state.setdefault("largest", torch.zeros_like(p))
        square = p.grad.square() + group["beta"] * largest
        largest.copy_(torch.max(largest, square) if group["beta"] > 0 else square)
        p.sub_(p.grad / (largest.sqrt() + 0.1), alpha=group["lr"])


class EstimateGrowsLater(Own):
    """As D-Adaptation: the estimate stays as it is in two steps, and grows in later ones."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        group["d"] = max(group.setdefault("d", 0.5), group["k"] / 4)
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"] * group["d"])


class NumbersOfTensors(Own):
    def update(self, p, state, group):
        largest = max(p.grad.abs().max(), 0.01, p.norm())
        least = min([group["lr"], p.grad.norm(), math.sqrt(p.grad.square().mean())])
        p.sub_(p.grad / largest * least)


class WritesRows(Own):
    def update(self, p, state, group):
        outside = p.grad.abs() > 0.05
        p.grad[outside] = p.grad[outside].sign() * 0.05
        p.sub_(p.grad, alpha=group["lr"])


class NoWarmUp(Own):
    """The way that divides by zero is never taken."""

    warm_up = 0

    def update(self, p, state, group):
        state["step"] = state.get("step", 0) + 1
        share = state["step"] / self.warm_up if state["step"] < self.warm_up else 1.0
        p.sub_(p.grad, alpha=group["lr"] * share)


class ChangesNumbersLater(Own):
    """Numbers of a group, of the optimizer and of a parameter stay as they are in three steps."""

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        group.setdefault("share", 1.0)
        if group["count"] == 4:
            self.scale = 0.25
            group["share"], group["lr"] = 0.5 * group["share"], 3 * group["lr"]
        super().step()

    def update(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"] * self.scale * group["share"])


class RestartsLater(Own):
    def update(self, p, state, group):
        if not state:
            state.update(count=0, restart=0)
        state["count"] += 1
        if state["count"] == 3:
            state["restart"] = state["count"]
        p.sub_(p.grad, alpha=group["lr"] / (1 + state["count"] - state["restart"]))


class DividesByFirstNorm(Own):
    """As D-Adaptation of gradient descent: a number of the first gradients, which later steps only read."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        count = group.setdefault("count", 0)
        if count == 0:
            group["first"] = sum((p.grad**2).sum() for p in group["params"]).sqrt().reshape(1).item()
        group["count"] = count + 1
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"] / group["first"])


class KeepsFirstNorms(Own):
    def update(self, p, state, group):
        if not state:
            state["first"] = float(p.grad.norm())
        p.sub_(p.grad / state["first"], alpha=group["lr"])


OPTIMIZERS = [
    ChangesNumbersLater,
    RestartsLater,
    DividesByFirstNorm,
    KeepsFirstNorms,
    KeepsObjects,
    RemembersNorm,
    OtherRuleAtZeroLater,
    EstimateGrowsLater,
    NumbersOfTensors,
    WritesRows,
    NoWarmUp,
    Attribute,
    LazyMean,
    StartsAsGradient,
    Factored,
    Counted,
    AsksForFloats,
    WarmsUp,
    OfGroup,
    CountsInItsDefaults,
    TensorOfGroup,
    Nested,
    ForEach,
    DecidesOnGradients,
    CallsItsBase,
    SlowBuffer,
    InAList,
    OnlyRemembersAtFirst,
    SumInDefaults,
    ConstantsInItsStep,
    DecidesForEachParameter,
    OtherRuleAtZero,
    KeyedByHyperparameter,
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def step_of(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> ig.TrainStep:
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, make(model.parameters()), inputs)


def batch(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {"x": rng.standard_normal((6, 4)).astype(np.float32), "y": rng.standard_normal((6, 3)).astype(np.float32)}


class Towers(nn.Module):
    """Equal networks on one input, each with its own optimizer: a step compiles them in the time of a few."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: network() for name in names})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers.values()]


def sum_of_losses(outputs: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return torch.stack([nn.functional.mse_loss(output, y) for output in outputs]).sum()


# For each optimizer and each of five steps: the compiled and the eager parameters.
Trained = dict[str, list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]]


def trained(makes: Sequence[Callable[..., torch.optim.Optimizer]], folder: Path, *, started: bool) -> Trained:
    """Train one step with all these optimizers, compiled and in eager, after two eager steps if `started`."""
    model = Towers(make.__name__ for make in makes)
    optimizers = [make(tower.parameters()) for make, tower in zip(makes, model.towers.values(), strict=True)]
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    step = ig.TrainStep(model, sum_of_losses, optimizers, inputs)

    def train_in_eager(number: int) -> None:
        values = {n: torch.from_numpy(v) for n, v in batch(number).items()}
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        sum_of_losses(model(values["x"]), values["y"]).backward()
        for optimizer in step.optimizers:
            optimizer.step()

    for number in (7, 8) if started else ():
        train_in_eager(number)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    session = ig.compile(step, folder / "step", entry_points=["train_step"]).load()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    steps: Trained = {make.__name__: [] for make in makes}
    for number in range(5):
        session.train_step(**batch(number))
        train_in_eager(number)
        found = session.state()
        for name, made in steps.items():
            prefix = f"towers.{name}."
            expected = {n: v.numpy().copy() for n, v in model.state_dict().items() if n.startswith(prefix)}
            made.append(({n: found[n] for n in expected}, expected))
    return steps


# Each way through one of their steps is compiled, so in one step with others they would have too many ways.
ALONE = [
    ChangesNumbersLater,
    RestartsLater,
    DividesByFirstNorm,
    WarmsUp,
    DecidesOnGradients,
    DecidesForEachParameter,
    OtherRuleAtZero,
    RemembersNorm,
    NoWarmUp,
]
STARTED = [StartsAsGradient, Counted, OfGroup, Nested]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    together = [make for make in OPTIMIZERS if make not in ALONE]
    return trained(together, tmp_path_factory.mktemp("fresh"), started=False)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(STARTED, tmp_path_factory.mktemp("resumed"), started=True)


def check_steps(steps: Trained, make: Callable[..., torch.optim.Optimizer]) -> None:
    assert len(steps[make.__name__]) == 5
    for number, (found, expected) in enumerate(steps[make.__name__]):
        assert len(expected) == 4
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=f"{number}: {name}")


@pytest.mark.parametrize("make", [make for make in OPTIMIZERS if make not in ALONE])
def test_an_optimizer_trains_as_in_eager(make: Callable[..., torch.optim.Optimizer], fresh: Trained) -> None:
    check_steps(fresh, make)


@pytest.mark.parametrize("make", ALONE)
def test_an_optimizer_that_decides_trains_as_in_eager(
    make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    check_steps(trained([make], tmp_path, started=False), make)


@pytest.mark.parametrize("make", STARTED)
def test_an_optimizer_goes_on_as_in_eager(make: Callable[..., torch.optim.Optimizer], resumed: Trained) -> None:
    check_steps(resumed, make)


@pytest.mark.parametrize("make", [Counted, SumInDefaults])
def test_the_learning_rate_stays_a_run_time_input(make: type[Own], tmp_path: Path) -> None:
    model = network()
    session = ig.compile(step_of(make, model), tmp_path / "step", entry_points=["train_step"]).load()
    before = session.state()
    session.train_step(**batch(0), lr=0.0)
    after = session.state()
    assert all(np.array_equal(before[n], after[n]) for n in model.state_dict())


class Grows(Own):
    def update(self, p, state, group):
        state.setdefault("history", []).append(p.grad.clone())
        p.sub_(state["history"][-1], alpha=group["lr"])


class Toggles(Own):
    def update(self, p, state, group):
        state["is_odd"] = not state.get("is_odd", False)
        p.sub_(p.grad, alpha=group["lr"] if state["is_odd"] else 0.0)


class TogglesLater(Own):
    def update(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"] if state.setdefault("is_cold", True) else 2 * group["lr"])
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 5:
            state["is_cold"] = False


class GrowsLater(Own):
    def update(self, p, state, group):
        state["count"] = state.get("count", 0) + 1
        p.sub_(p.grad + state.get("kept", 0.0), alpha=group["lr"])
        if state["count"] == 5:
            state["kept"] = p.grad.clone()


class InTheEigenbasis(Own):
    """As SOAP: eigenvectors, whose signs are free, are kept and compared."""

    def update(self, p, state, group):
        rows = p.grad.reshape(-1, p.shape[-1])
        rotation = torch.linalg.eigh(rows.T @ rows + torch.diag(torch.arange(1.0, 1.0 + p.shape[-1])))[1]
        state["rotation"] = rotation
        p.sub_(((rows @ rotation).tanh() @ rotation.T).reshape(p.shape), alpha=group["lr"])


class Circle:
    def __init__(self, like: torch.Tensor) -> None:
        self.basis, self.whole = torch.ones_like(like), self


class KeepsCircles(Own):
    def update(self, p, state, group):
        circle = state.setdefault("circle", Circle(p))
        circle.basis = circle.basis * 0.9
        p.sub_(p.grad * circle.basis, alpha=group["lr"])


class KeyedByParameter(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.means: dict[torch.Tensor, torch.Tensor] = {}

    def update(self, p, state, group):
        self.means[p] = p.grad
        p.sub_(self.means[p], alpha=group["lr"])


class Wraps(Own):
    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.Adam(parameters)

    def step(self, closure: None = None) -> None:
        self.inner.step()


class Outside(Own):
    table = torch.ones(3)

    def update(self, p, state, group):
        p.sub_(p.grad * Outside.table.sum(), alpha=group["lr"])


class KeyedByAddress(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.counts: dict[int, int] = {}

    def update(self, p, state, group):
        self.counts[p.data_ptr()] = self.counts.get(p.data_ptr(), 0) + 1
        p.sub_(p.grad / self.counts[p.data_ptr()], alpha=group["lr"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Grows, "layout of its state"),
        (Toggles, "changes .*is_odd from step to step"),
        (TogglesLater, "changes .*is_cold from step to step"),
        (GrowsLater, "layout of its state from step to step, at optimizer/kept/"),
        (KeepsCircles, "keeps a tensor in an object of type Circle"),
        (KeyedByParameter, r"test_foreign.py.*\n.*KeyedByParameter keeps self.means.<a parameter> under"),
        (Wraps, "Wraps wraps another optimizer, self.inner"),
        (KeyedByAddress, r"test_foreign.py.*\n.*KeyedByAddress"),
        (Outside, "neither a parameter in the optimizer nor in its state"),
        (torch.optim.LBFGS, "LBFGS.step needs a closure"),
        (torch.optim.SparseAdam, "SparseAdam updates from sparse gradients"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        ig.compile(step_of(make, network()), "unwritten")


def test_too_many_ways_through_an_optimizer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MOST_WAYS", 1)
    with pytest.raises(CaptureError, match="more than 1 ways"):
        ig.compile(step_of(DecidesOnGradients, network()), "unwritten")


def test_eigenvectors_in_the_state_have_the_signs_of_the_compiled_step(tmp_path: Path) -> None:
    step = step_of(InTheEigenbasis, network())
    artifact = ig.compile(step, tmp_path / "step", entry_points=["train_step"])
    certificate = artifact.manifest.targets[0].certificate
    assert certificate is not None
    assert not certificate.unjudged


def test_a_first_step_after_steps_of_another_optimizer_is_refused() -> None:
    model = network()
    started = torch.optim.Adam(model[0].parameters())
    step = step_of(Own, model)
    model[0].weight.grad = torch.ones(5, 4)
    started.step()
    step = ig.TrainStep(model, step.loss, [started, SlowBuffer(model[2].parameters())], step.inputs)
    with pytest.raises(CaptureError, match="SlowBuffer has taken no step"):
        ig.compile(step, "unwritten")


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adagrad"])
def test_at_a_learning_rate_of_zero_no_parameter_moves(name: str, tmp_path: Path) -> None:
    """Rows of the embedding that no index names have a gradient of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    inputs = {"x": torch.randint(0, 3, (5, 3)), "y": torch.randint(0, 3, (5,))}
    step = ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)
    session = ig.compile(step, tmp_path / "step", entry_points=["train_step"]).load()
    before = session.state()
    values = {n: t.numpy() for n, t in inputs.items()}
    for lr in (0.0, 0.0, 1e-2, 0.0):
        session.train_step(**values, lr=lr)
        state = session.state()
        assert all(np.isfinite(v).all() for v in state.values())
        if lr == 0:
            assert all(np.array_equal(before[n], state[n]) for n in model.state_dict())
        before = state
