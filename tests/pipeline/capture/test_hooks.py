"""Hooks of the user's objects run in the compiled step as in eager, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.check_step import check
from irongrad.runtime.errors import CaptureError

Put = Callable[[nn.Module, torch.optim.Optimizer], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def make_step(put: Put, **options: object) -> ig.TrainStep:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    put(model, optimizer)
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, **options)


def masked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    model[0].weight.register_hook(lambda g: g * mask)


def decayed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def decay(parameter: torch.Tensor) -> None:
        parameter.grad.add_(parameter, alpha=0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(decay)


def halved_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.register_hook(lambda g: g.mul_(0.5))


def normed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def norm(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        total = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.div_(total)

    optimizer.register_step_pre_hook(norm)


def clamped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    @torch.no_grad()
    def clamp(optimizer: object, args: object, kwargs: object) -> None:
        model[2].weight.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)


HOOKS: list[Put] = [masked, decayed, halved_in_place, normed, clamped]


class Towers(nn.Module):
    """Equal networks on one input, one for each hook and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: network() for name in (*(put.__name__ for put in HOOKS), "plain")})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers.values()]


def sum_of_losses(outputs: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return torch.stack([nn.functional.mse_loss(output, y) for output in outputs]).sum()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], Towers]:
    """The state of a compiled step after three calls, and the model that eager trains."""
    model = Towers()
    optimizers = [torch.optim.SGD(tower.parameters(), lr=0.1, momentum=0.9) for tower in model.towers.values()]
    for put, optimizer in zip(HOOKS, optimizers[:-1], strict=True):
        put(model.towers[put.__name__], optimizer)
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    step = ig.TrainStep(model, sum_of_losses, optimizers, inputs)
    session = ig.compile(step, tmp_path_factory.mktemp("hooks") / "step", entry_points=["train_step"]).load()
    rng = np.random.default_rng(0)
    for _ in range(3):
        x, y = rng.standard_normal((6, 4)).astype(np.float32), rng.standard_normal((6, 3)).astype(np.float32)
        session.train_step(x=x, y=y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum_of_losses(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return session.state(), model


@pytest.mark.parametrize("put", HOOKS)
def test_a_hook_on_gradients_or_updates_is_compiled(put: Put, trained: tuple[dict[str, np.ndarray], Towers]) -> None:
    found, model = trained
    hooked, plain = model.towers[put.__name__], model.towers["plain"]
    for name, value in hooked.state_dict().items():
        made = found[f"towers.{put.__name__}.{name}"]
        np.testing.assert_allclose(made, value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    made = found[f"towers.{put.__name__}.0.weight"]
    assert not np.allclose(made, plain[0].weight.detach().numpy(), atol=1e-4), "the hook does nothing"


class HookInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        h.register_hook(lambda g: g * 2)
        return h


class SavedInside(HookInside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return self.linear(x).exp()


def refused(model: nn.Module) -> str:
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        ig.compile(ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs), "unwritten")
    return str(caught.value)


@pytest.mark.parametrize(("make", "kind"), [(HookInside, "tensor inside the forward"), (SavedInside, "saved-tensors")])
def test_a_hook_inside_the_forward_is_refused_with_its_line(make: type[nn.Module], kind: str) -> None:
    message = refused(make())
    assert kind in message
    assert f"{__file__}:" in message


def test_a_backward_hook_of_a_module_is_refused_with_its_place() -> None:
    model = network()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: None)
    message = refused(model)
    assert "backward hook of model.2 (Linear)" in message
    assert f"{__file__}:" in message


def test_a_hook_that_changes_a_python_value_is_refused() -> None:
    model, seen = network(), []
    model[0].weight.register_hook(lambda g: seen.append(1))
    assert "Python value" in refused(model)
    assert seen == []


def test_a_hook_that_decides_on_values_is_refused_with_its_line() -> None:
    model = network()
    model[0].weight.register_hook(lambda g: g * 2 if g.sum() > 0 else g)
    message = refused(model)
    assert "gradient hook of the parameter '0.weight'" in message
    assert f"{__file__}:" in message


def test_the_hooks_of_a_checkpoint_are_no_hooks_of_the_user(tmp_path: Path) -> None:
    class Checkpointed(HookInside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)

    model = Checkpointed()
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    ig.compile(step, tmp_path / "step", entry_points=["train_step"])


class NodeInside(HookInside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.training:
            h.grad_fn.register_prehook(lambda g: (g[0] * 2,))
        return h


class DefaultsInside(HookInside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t * 2, lambda t: t)
        try:
            return self.linear(x).exp()
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.mark.parametrize(("make", "kind"), [(NodeInside, "autograd node"), (DefaultsInside, "saved-tensors")])
def test_a_hook_that_no_tensor_shows_is_refused_with_its_line(make: type[nn.Module], kind: str) -> None:
    message = refused(make())
    assert kind in message
    assert f"{__file__}:" in message


def test_a_hook_on_the_node_that_accumulates_a_gradient_is_refused() -> None:
    model = network()
    node = torch.autograd.graph.get_gradient_edge(model[2].bias).node
    node.register_prehook(lambda g: (g[0] * 2,))
    message = refused(model)
    assert "gradient of '2.bias' (AccumulateGrad)" in message
    assert f"{__file__}:" in message


def test_a_node_that_accumulates_the_gradient_of_a_frozen_parameter_is_refused() -> None:
    """The parameter may no longer be frozen when a step runs; it stays frozen here."""
    model = network()
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    model[0].weight.requires_grad_(False)
    assert f"gradient of '0.weight' ({type(node).__name__})" in refused(model)
    assert not model[0].weight.requires_grad


def test_the_users_hook_inside_of_a_librarys_is_named() -> None:
    model = network()
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda gradients: None)
    assert refused(model).startswith(f"{__file__}:")


def updates_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    model[0].weight.register_post_accumulate_grad_hook(update)


def schedules(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def decays_the_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def decay(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    optimizer.register_step_pre_hook(decay)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.count += 1
        optimizer.param_groups[0]["params"][0].grad.mul_(1 / self.count)


def counts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(Counter())


def replaces_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step

    def clamped(closure: None = None) -> None:
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
        step(closure)

    optimizer.step = clamped


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (updates_in_backward, "writes into the parameter"),
        (schedules, "changes 'lr' of parameter group 0"),
        (decays_the_rate, "changes 'lr' of parameter group 0"),
        (counts, "(count), a Python value"),
        (replaces_step, "is replaced by another function"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_a_compiled_update_would_lose_is_refused_at_its_line(put: Put, reason: str) -> None:
    report = check(make_step(put))
    assert reason in str(report.error)
    assert str(report.error).startswith(f"{__file__}:")


def test_a_tensor_that_keeps_its_gradient_for_python_is_compiled() -> None:
    class Keeps(HookInside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            if h.requires_grad:
                h.retain_grad()
            return h

    model = Keeps()
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    assert check(step).error is None
