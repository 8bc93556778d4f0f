"""What runs after the update: the state is that of the user's own loop, or the step is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError

Change = Callable[[], object]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(16, 4, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}


def make_step(model: nn.Module, **changed: Any) -> ig.TrainStep:
    return ig.TrainStep(model, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(), **changed)


def averaged(model: nn.Module) -> tuple[dict[str, Any], Change]:
    mean = AveragedModel(model)
    return {"after_step": mean}, lambda: mean.update_parameters(model)


def moving_average(model: nn.Module) -> tuple[dict[str, Any], Change]:
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return {"after_step": mean}, lambda: mean.update_parameters(model)


def own_average(model: nn.Module) -> tuple[dict[str, Any], Change]:
    mean = AveragedModel(model, avg_fn=get_ema_avg_fn(0.7))
    return {"after_step": mean, "modules": {"ema": mean}}, lambda: mean.update_parameters(model)


def clipped(model: nn.Module) -> tuple[dict[str, Any], Change]:
    def clip(model: nn.Module, limit: float = 0.05) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-limit, limit)

    return {"after_step": clip}, lambda: clip(model)


def soft_target(model: nn.Module) -> tuple[dict[str, Any], Change]:
    target = copy.deepcopy(model)

    def update(model: nn.Module, tau: float = 0.1) -> None:
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.copy_(tau * fast.data + (1 - tau) * slow.data)

    return {"after_step": update, "modules": {"target": target}}, lambda: update(model)


def assigned_target(model: nn.Module) -> tuple[dict[str, Any], Change]:
    target = copy.deepcopy(model)

    def update() -> None:
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1

    return {"after_step": update, "modules": {"target": target}}, update


def normalised(model: nn.Module) -> tuple[dict[str, Any], Change]:
    def normalise(model: Any) -> None:
        model[0].weight.copy_(nn.functional.normalize(model[0].weight, dim=1))

    def both() -> None:
        with torch.no_grad():
            normalise(model)
            model[3].bias.mul_(0.5)

    return {"after_step": [normalise, lambda m: m[3].bias.mul_(0.5)]}, both


def differences(step: ig.TrainStep, state: dict[str, np.ndarray]) -> dict[str, float]:
    modules = {"": step.model, **{f"{name}.": module for name, module in step.modules.items()}}
    tensors = {f"{prefix}{n}": t for prefix, m in modules.items() for n, t in m.state_dict().items()}
    return {n: float(np.abs(state[n].astype(float) - t.double().numpy()).max()) for n, t in tensors.items()}


def train_eagerly(step: ig.TrainStep, after: Callable[[int], object], steps: int) -> None:
    (optimizer,) = step.optimizers
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        cross_entropy(step.model(batch()["x"]), batch()["y"]).backward()
        optimizer.step()
        after(number)


@pytest.mark.parametrize(
    "make", [averaged, moving_average, own_average, clipped, soft_target, assigned_target, normalised]
)
def test_the_state_is_that_of_the_users_loop(make: Any, tmp_path: Path) -> None:
    model = make_model()
    changed, change = make(model)
    step = make_step(model, **changed)
    ig.compile(step, tmp_path / "net")
    with load(tmp_path / "net") as session:
        for _ in range(2):
            session.train_step(**batch())
        session.train_steps(**{n: np.stack([t.numpy()] * 3) for n, t in batch().items()})
        train_eagerly(step, lambda number: change(), 5)
        assert max(differences(step, session.state()).values()) < 2e-6


def test_every_so_many_updates_with_numbers_from_the_caller(tmp_path: Path) -> None:
    model = make_model()
    target = copy.deepcopy(model)

    def update(model: nn.Module, tau: float = 1.0) -> None:
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, tau)

    step = make_step(model, after_step=ig.every(2, update), modules={"target": target})
    ig.compile(step, tmp_path / "net")

    def after(number: int) -> None:
        if number % 2 == 0:
            with torch.no_grad():
                update(model, 0.25)

    with load(tmp_path / "net") as session:
        assert {h.name: h.default for h in session.manifest.hypers}["tau"] == 1.0
        for _ in range(3):
            session.grad_step(**batch())
            session.apply_step(tau=0.25)
        session.save(tmp_path / "net.safetensors")
    with load(tmp_path / "net", checkpoint=tmp_path / "net.safetensors") as session:  # the count goes on
        session.train_step(**batch(), tau=0.25)
        train_eagerly(step, after, 4)
        assert max(differences(step, session.state()).values()) < 2e-6


def test_a_target_network_is_used_by_the_loss_and_by_an_entry(tmp_path: Path) -> None:
    model = make_model()
    target = copy.deepcopy(model)

    def loss(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(x).softmax(-1)
        return -(wanted * out.log_softmax(-1)).sum(-1).mean()

    def update(model: nn.Module, tau: float = 0.2) -> None:
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, tau)

    x = batch()["x"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = ig.TrainStep(
        model, loss, optimizer, {"x": x}, loss_inputs=["x"], after_step=update, modules={"target": target},
        entries={"wanted": (target, {"x": x[:1]})},
    )  # fmt: skip
    ig.compile(step, tmp_path / "net")
    with load(tmp_path / "net") as session:
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model(x), x)
            value.backward()
            optimizer.step()
            with torch.no_grad():
                update(model)
            assert session.train_step(x=x) == pytest.approx(value.item(), abs=1e-5)
        target.eval()
        np.testing.assert_allclose(session.call("wanted", x=x[:1]), target(x[:1]).detach(), atol=1e-5)


def outside(model: nn.Module) -> Any:
    target = copy.deepcopy(model)
    return lambda m: target[3].bias.copy_(m[3].bias)  # type: ignore[index]


def reading(model: nn.Module) -> Any:
    scale = torch.tensor(0.5)
    return lambda m: m[3].bias.mul_(scale)


def counting(model: nn.Module) -> Any:
    count = [0]

    def after(m: Any) -> None:
        count[0] += 1
        if count[0] % 2:
            m[3].bias.zero_()

    return after


def of_the_optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch()["x"]).sum().backward()
    optimizer.step()

    def after(m: Any) -> None:
        optimizer.state[m[3].bias]["exp_avg"].zero_()

    return optimizer, after


def of_the_rate(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def after(m: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    return optimizer, after


def aliasing(model: nn.Module) -> Any:
    model.register_buffer("copied", torch.zeros(3))

    def after(m: Any) -> None:
        m.copied = m[3].bias.detach()

    return after


def of_a_scheduler(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1).step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_the_rate, r"test_after_step.py:\d+: after_step changes 'lr' of the optimizer.*ig.hypers"),
        (of_a_scheduler, "after_step is a scheduler.*ig.hypers"),
        (aliasing, "assigns to the buffer 'copied' the memory of 'bias', and it would follow.*clone"),
        (lambda model: lambda m: m[3].bias.copy_(m[3].bias.grad), "a gradient is used up by the update before it"),
        (outside, r"test_after_step.py:\d+: after_step changes a tensor of shape \(3,\) that is neither in the model"),
        (reading, r"test_after_step.py:\d+: after_step reads a tensor that is neither in the model"),
        (counting, r"test_after_step.py:\d+: after_step changes a Python value"),
        (of_the_optimizer, r"test_after_step.py:\d+: after_step changes a tensor of the optimizer's state"),
        (lambda model: lambda m: m[3].bias.add_(torch.rand(3)), "after_step draws random numbers"),
        (lambda model: lambda m: m[9].zero_(), r"test_after_step.py:\d+.*\n  after_step fails: "),
        (lambda model: lambda m, other: None, "needs m, other. Give the others defaults"),
        (lambda model: lambda m, eps=0.1: m[3].bias.mul_(eps), "the names of hyperparameters"),
        (lambda model: 3, "after_step is a int; it must be a function of the model"),
    ],
)
def test_what_cannot_be_compiled_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    model = make_model()
    made = make(model)
    optimizer, after = made if isinstance(made, tuple) else (torch.optim.AdamW(model.parameters()), made)
    with pytest.raises(CaptureError, match=message):
        ig.compile(ig.TrainStep(model, cross_entropy, optimizer, batch(), after_step=after), tmp_path / "net")


class Scaled(nn.Linear):
    """A layer with a factor that is a number in the forward."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(self.scale)


def test_a_change_of_a_buffer_that_the_forward_reads_as_a_number_is_refused(tmp_path: Path) -> None:
    """Also one that comes after more updates than verification makes."""
    model = Scaled()
    inputs = {"x": torch.randn(4, 5), "y": torch.randint(3, (4,))}
    after = ig.every(100, lambda model: model.scale.mul_(0.5))
    step = ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters()), inputs, after_step=after)
    with pytest.raises(
        CaptureError, match=r"float\(self.scale\)\n.*the buffer scale, which after_step or another step changes"
    ):
        ig.compile(step, tmp_path / "net")


def test_a_read_of_the_learning_rate_is_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def shrink(model: Any) -> None:
        model[3].bias.mul_(1 - optimizer.param_groups[0]["lr"])

    step = ig.TrainStep(model, cross_entropy, optimizer, batch(), after_step=shrink)
    with pytest.raises(CaptureError, match=r"test_after_step.py:\d+: .*\n  the step reads 'lr' of the optimizer"):
        ig.compile(step, tmp_path / "net")
    assert type(optimizer.param_groups[0]) is dict


@pytest.mark.parametrize("updates", [0, True, 1.5])
def test_the_number_of_updates_is_a_positive_integer(updates: Any) -> None:
    with pytest.raises(CaptureError, match="must be a positive integer"):
        ig.every(updates, print)


class Recent(nn.Module):
    """A model with an average and a counter that are assigned anew, as in a moving average of a script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(2, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("here", torch.zeros(2))
        self.register_buffer("there", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def follow(self) -> None:
        self.here, self.there = self.there, self.here
        self.count = self.count + 1
        self.average = 0.9 * self.average + 0.1 * self.layer.weight
        self.average = torch.where(self.count % 2 == 0, self.average, 0.5 * self.average)


def test_a_buffer_may_be_assigned_anew(tmp_path: Path) -> None:
    def made() -> tuple[Recent, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Recent()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made()
    x = torch.randn(3, 4)
    step = ig.TrainStep(model, lambda o: o.square().mean(), optimizer, {"x": x}, after_step=model.follow)
    ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    model, optimizer = made()
    with load(tmp_path / "net") as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.follow()
            session.train_step(x=x)
        for name, tensor in model.state_dict().items():
            np.testing.assert_allclose(session.state()[name], tensor, atol=1e-6, err_msg=name)
