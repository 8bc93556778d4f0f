"""Derivatives that a model or a loss computes itself: their joint graphs give eager's loss and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.func import grad as grad_of
from torch.nn import functional

import irongrad as ig
from irongrad.graph.step_graph import Function
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import JointStep, differentiate
from irongrad.runtime.errors import CaptureError, UnsupportedOpError

Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


class Program(nn.Module):
    """A network, and a loss that `forward` computes from it and the inputs `x`, `v` and `y`."""

    def __init__(self, forward: Forward, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._forward = forward

    def forward(self, x: Tensor, v: Tensor, y: Tensor) -> Tensor:
        keep = 0 * (v.sum() + y.sum())  # every input has to be used
        return self._forward(self.net, {"x": x, "v": v, "y": y}) + keep


def perceptron(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


def convolutions() -> nn.Module:
    layers = (nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 1))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))


def gradient_penalty(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    x = inputs["x"].requires_grad_()
    score = net(x)
    (gradient,) = grad(score, x, torch.ones_like(score), create_graph=True)
    return score.mean() + (gradient.norm(dim=1) - 1).square().mean()


def second_derivative(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    x = inputs["x"]
    x.requires_grad = True
    u = net(x)
    first = grad(u.sum(), x, create_graph=True)[0]
    second = grad(first[:, 0].sum(), x, create_graph=True)[0]
    return (second[:, 0] + u[:, 0] * first[:, 1]).square().mean()


def two_inner_steps(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    weights = dict(net.named_parameters())
    for _ in range(2):
        inner = functional.mse_loss(functional_call(net, weights, (inputs["x"],)), inputs["v"][:, :1])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return functional_call(net, weights, (inputs["v"],)).square().mean()


def adversarial_example(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    x = inputs["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(net(x), inputs["y"]), [x])
    return functional.cross_entropy(net((x + 0.1 * gradient.sign()).detach()), inputs["y"])


def gradient_by_a_hidden_tensor(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    hidden = net[0](inputs["x"])
    (gradient,) = torch.autograd.grad(net[2](net[1](hidden)).square().sum(), hidden, create_graph=True)
    return gradient.square().mean()


def gradient_within_no_grad(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        base = net(inputs["x"])
        with torch.enable_grad():
            x = inputs["x"].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(net(x).pow(3).sum(), x)
    return (net(inputs["x"]) - base / 2 - gradient[:, :1]).square().mean()


def follows_from_the_second_use_on(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    x = inputs["x"].detach()
    before = net(x).square()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((before + net(x)).sum(), x, create_graph=True)
    return gradient.square().mean()


def unused_inputs(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    x, v = inputs["x"].requires_grad_(), inputs["v"].requires_grad_()
    used, unused = grad(net(x).square().sum(), (x, v), create_graph=True, allow_unused=True)
    assert unused is None
    return used.square().mean()


def hessian_vector_product(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        return net(x).sum()

    _, product = torch.autograd.functional.hvp(value, inputs["x"], inputs["v"], create_graph=True)
    return product.square().sum()


def jacobian_in_one_call(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def sums(x: Tensor) -> Tensor:
        return net(x).sum(0)

    return torch.autograd.functional.jacobian(sums, inputs["x"], create_graph=True, vectorize=True).square().mean()


def norms_per_sample(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    weights = dict(net.named_parameters())

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    gradients = vmap(grad_of(one), in_dims=(None, 0, 0))(weights, inputs["x"], inputs["y"])
    return sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt().mean()


def norms_per_sample_of_a_convolution(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    weights = dict(net.named_parameters())

    def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, weights, (x[None],)).square().sum()

    gradients = vmap(grad_of(one), in_dims=(None, 0))(weights, inputs["x"])
    return sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt().mean()


def hessians(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        return net(x).squeeze()

    first, second = vmap(jacrev(value))(inputs["x"]), vmap(hessian(value))(inputs["x"])
    return (second[:, 0, 0] + first[:, 1]).square().mean()


def forward_mode(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    divergence = vmap(jacfwd(net))(inputs["x"]).sum((1, 2))
    _, tangent = jvp(net, (inputs["x"],), (inputs["v"],))
    return (divergence + tangent.sum(1)).mean()


def pulled_back(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    outputs, pull = vjp(net, inputs["x"])
    (gradient,) = pull(outputs.detach())
    return (outputs.square().sum(1) + gradient.square().sum(1)).mean()


def detached_within(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        return (torch.tanh(net(x)) * torch.sigmoid(net(x)).detach()).sum()

    return grad_of(value)(inputs["x"]).square().sum()


def no_grad_within_a_transform(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = net(x).sigmoid()
            with torch.enable_grad():
                enabled = (net(x) * weight).tanh()
            disabled = enabled.sin()
        return (net(x) * enabled * disabled + weight * net(x)).sum()

    return grad_of(value)(inputs["x"]).square().sum()


def transforms_within_no_grad(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        return net(x).pow(3).sum()

    with torch.no_grad():
        at_once, for_each = grad_of(value)(inputs["x"]), vmap(grad_of(value))(inputs["v"])
    return net(inputs["x"] + at_once + for_each).square().mean()


def transform_within_no_grad_of_another(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = grad_of(lambda x: net(x).sin().sum())(x)
        return net(x * inner).tanh().sum()

    return grad_of(value)(inputs["x"]).square().sum()


def no_grad_between_transforms(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    first = grad_of(lambda x: net(x).sin().sum())(inputs["x"])
    with torch.no_grad():
        weight = net(inputs["v"]).sigmoid()
    second = grad_of(lambda x: net(x).cos().sum())(inputs["v"])
    return ((first * second)[:, :1] * net(inputs["x"]) * weight).sum()


def no_grad_before_the_pullback(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    outputs, pull = vjp(net, inputs["x"])
    with torch.no_grad():
        weight = outputs.tanh()
    (gradient,) = pull(weight)
    return (gradient * outputs.sum()).square().sum()


def float32_within_a_transform(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def value(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            detached = net(x).sigmoid().detach()
            with torch.no_grad():
                disabled = net(x).sin()
            weight = net(x).tanh()
        return (net(x) * (detached + disabled) * weight).sum()

    return grad_of(value)(inputs["x"]).square().sum()


def no_grad_within_nested_autocast(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        whole = net(inputs["x"])
        with torch.no_grad():
            fixed = net(inputs["v"])
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                coarse = net(inputs["v"])
            last = net(inputs["x"])
    return (whole * fixed * coarse * last).mean()


PROGRAMS: dict[Forward, Callable[[], nn.Module]] = {
    gradient_penalty: convolutions,
    second_derivative: perceptron,
    two_inner_steps: perceptron,
    adversarial_example: lambda: perceptron(4),
    gradient_by_a_hidden_tensor: perceptron,
    gradient_within_no_grad: perceptron,
    follows_from_the_second_use_on: perceptron,
    unused_inputs: perceptron,
    hessian_vector_product: perceptron,
    jacobian_in_one_call: lambda: perceptron(2),
    norms_per_sample: lambda: perceptron(4),
    norms_per_sample_of_a_convolution: convolution,
    hessians: perceptron,
    forward_mode: lambda: perceptron(3),
    pulled_back: lambda: perceptron(2),
    detached_within: lambda: perceptron(2),
    no_grad_within_a_transform: lambda: perceptron(2),
    transforms_within_no_grad: lambda: perceptron(2),
    transform_within_no_grad_of_another: lambda: perceptron(2),
    no_grad_between_transforms: perceptron,
    no_grad_before_the_pullback: lambda: perceptron(2),
    float32_within_a_transform: lambda: perceptron(2),
    no_grad_within_nested_autocast: lambda: perceptron(2),
}


def made(forward: Forward, **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Program(forward, PROGRAMS.get(forward, perceptron)())
    inputs = {"x": torch.randn(6, 3), "v": torch.randn(6, 3), "y": torch.randint(4, (6,))}
    return ig.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1), inputs, **options)


@functools.cache
def differentiated(forward: Forward) -> JointStep:
    """The joint step of `made(forward)`; two tests run it."""
    return differentiate(capture(made(forward)))


def run(joint: JointStep, function: Function, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = {s.name: s.initial for s in joint.state} | dict(inputs)
    with torch.no_grad():
        results = function.graph(*(values[a.name].clone() for a in function.arguments))
    return {r.name: t for r, t in zip(function.results, results, strict=True) if r.kind in ("gradient", "output")}


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda f: f.__name__)
def test_the_joint_graph_has_eagers_loss_and_gradients(forward: Forward) -> None:
    step, joint = made(forward), differentiated(forward)
    found = run(joint, joint.joint, step.inputs)
    loss = step.model(**{n: t.clone() for n, t in step.inputs.items()})
    loss.backward()
    torch.testing.assert_close(found.pop("loss").reshape(()), loss.detach(), rtol=1e-4, atol=1e-5)
    expected = {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    for name in expected.keys() | found.keys():
        zeros = torch.zeros_like(dict(step.model.named_parameters())[name])
        torch.testing.assert_close(found.get(name, zeros), expected.get(name, zeros), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda f: f.__name__)
def test_the_joint_graph_has_eagers_loss_and_gradients_under_autocast(forward: Forward) -> None:
    step = made(forward, precision="bf16")
    joint = differentiate(capture(step))
    found = run(joint, joint.joint, step.inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step.model(**{n: t.clone() for n, t in step.inputs.items()})
    loss.backward()
    torch.testing.assert_close(found.pop("loss").reshape(()), loss.detach(), rtol=5e-3, atol=1e-5)
    expected = {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    names = sorted(expected.keys() & found.keys())
    all_expected, all_found = (torch.cat([g[n].flatten() for n in names]) for g in (expected, found))
    assert (all_found - all_expected).norm() < 5e-3 * all_expected.norm()


def test_a_function_of_vjp_where_gradients_are_enabled_again_is_refused() -> None:
    def apart(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            outputs, pull = vjp(net, inputs["x"])
        return (pull(outputs)[0] * net(inputs["x"])).square().sum()

    with pytest.raises(UnsupportedOpError, match="Call both in one place"):
        capture(made(apart))


@pytest.mark.parametrize("forward", [gradient_penalty, second_derivative, hessians], ids=lambda f: f.__name__)
def test_the_evaluation_has_eagers_loss(forward: Forward) -> None:
    step, joint = made(forward), differentiated(forward)
    found = run(joint, joint.inference["eval"], step.inputs)["loss"].reshape(())
    loss = step.model.eval()(**{n: t.clone() for n, t in step.inputs.items()})
    torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-5)


def test_a_step_of_any_size_differentiates(tmp_path: Path) -> None:
    """A compiled gradient penalty of any size trains at another size as eager does."""
    sizes = {"x": {0: "B"}, "v": {0: "B"}, "y": {0: "B"}}
    session = ig.compile(made(second_derivative, dynamic=sizes), tmp_path / "any", entry_points=("train_step",)).load()
    twin = made(second_derivative)
    batch = {n: t[:4].clone() for n, t in twin.inputs.items()}
    for _ in range(2):
        found = session.train_step(**{n: t.numpy() for n, t in batch.items()})
        twin.optimizers[0].zero_grad()
        loss = twin.model(**{n: t.clone() for n, t in batch.items()})
        loss.backward()
        twin.optimizers[0].step()
        assert abs(float(found) - loss.item()) < 1e-4


def test_a_transform_over_a_named_dimension_is_refused() -> None:
    sizes = {"x": {0: "B"}, "v": {0: "B"}, "y": {0: "B"}}
    with pytest.raises(CaptureError, match="leave 'B' out of dynamic"):
        capture(made(norms_per_sample, dynamic=sizes))


def test_an_input_that_is_not_used_is_refused_as_in_eager() -> None:
    def unused(net: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        x, v = inputs["x"].requires_grad_(), inputs["v"].requires_grad_()
        return grad(net(x).sum(), (x, v), create_graph=True)[0].sum()

    with pytest.raises(CaptureError, match="appears to not have been used in the graph"):
        capture(made(unused))
