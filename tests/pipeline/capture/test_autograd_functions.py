"""A torch.autograd.Function keeps its backward, however it is called; writes into tensors are refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import irongrad as ig
from irongrad.diagnostics import source_lines
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime.errors import CaptureError

Backward = Callable[[Any, torch.Tensor], torch.Tensor]


class Written(torch.autograd.Function):
    """Writes into its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, module: nn.Module, backward: Backward) -> torch.Tensor:
        seen.add_(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None, None, None


class Recorded(torch.autograd.Function):
    """Its backward is the function that `apply` gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, module: nn.Module, backward: Backward) -> torch.Tensor:
        ctx.seen, ctx.module, ctx.run = seen, module, backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.run(ctx, gradient), None, None, None


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], backward: Backward) -> None:
        super().__init__()
        self.linear, self.function, self.run = nn.Linear(4, 3), function, backward
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.linear(x), self.seen, self, self.run)


def compiled(function: type[torch.autograd.Function], backward: Backward, directory: Path) -> None:
    model = Model(function, backward)
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    ig.compile(step, directory, entry_points=("train_step",), cache=False)


def _of_module(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    ctx.module.seen.copy_(gradient.mean())
    return gradient


def _element(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    ctx.seen[0] = gradient.mean()
    return gradient


def _through_data(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    ctx.seen.data += gradient.mean()
    return gradient


def _as_output(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    torch.add(ctx.seen, 1, out=ctx.seen)
    return gradient


@pytest.mark.parametrize("backward", [_of_module, _element, _through_data, _as_output])
def test_a_backward_that_writes_a_buffer_is_refused_at_its_line(backward: Backward, tmp_path: Path) -> None:
    line = rf"test_autograd_functions\.py:{backward.__code__.co_firstlineno + 1}: "
    with pytest.raises(CaptureError, match=line) as refused:
        compiled(Recorded, backward, tmp_path / "step")
    assert "Recorded.backward of a torch.autograd.Function writes into" in str(refused.value)


def test_a_forward_that_writes_its_argument_is_refused_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"seen\.add_\(1\)\n  Written\.forward of a torch\.autograd\.Function writes"
    ):
        compiled(Written, lambda ctx, gradient: gradient, tmp_path / "step")


def test_a_backward_may_write_into_new_tensors_and_its_gradient(tmp_path: Path) -> None:
    """Compiling compares the gradients with eager PyTorch."""

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        scale = torch.zeros(3)
        scale[1:] = 2
        own = gradient.clone()
        own.mul_(scale)
        return gradient.add_(own)

    compiled(Recorded, backward, tmp_path / "step")


class WritesItsOwn(torch.autograd.Function):
    """Writes into tensors of its own: through views and masks, at indices, and as the output of an operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, module: nn.Module, backward: Backward) -> torch.Tensor:
        own = x.sum(1, keepdim=True).expand(-1, 3).clone()
        own /= torch.full((len(x), 1), 3)
        own[:, 1].mul_(3)
        own[own > 0.5] = 0.25
        own.index_add_(1, torch.tensor([0, 2]), x[:, :2])
        torch.mul(own, 2, out=own)
        ctx.save_for_backward(own)
        return x + own.exp_().clamp_(max=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return gradient * own, None, None, None


def test_a_forward_may_write_into_new_tensors(tmp_path: Path) -> None:
    """Compiling compares the loss and the gradients with eager PyTorch."""
    compiled(WritesItsOwn, lambda ctx, gradient: gradient, tmp_path / "step")


SURROGATE = """
import torch

class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert torch.equal(x[:, None], x[:, None])
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient / (1 + x.square())

class Spikes(torch.nn.Linear):
    def forward(self, x):
        return Spike.apply(super().forward(x))
"""


def test_the_backward_of_a_function_in_a_package_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling compares the gradients with eager PyTorch; that of the comparison itself is zero."""
    (tmp_path / "spiking_package.py").write_text(SURROGATE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_PACKAGES", "_LIBRARIES"):
        monkeypatch.setattr(source_lines, name, (*getattr(source_lines, name), str(tmp_path)))
    spikes = importlib.import_module("spiking_package").Spikes
    model = nn.Sequential(nn.Linear(4, 5), spikes(5, 3))
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    ig.compile(step, tmp_path / "step", entry_points=("train_step",), cache=False)


class Sign(torch.autograd.Function):
    """A sign whose gradient passes straight through, `factor` times."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.factor, None


sign = Sign.apply  # bound before any export, as people name their functions


@pytest.mark.parametrize("call", [Sign.apply, sign, lambda x: Sign.apply(x, factor=2.0), lambda x: sign(x, 0.5)])
def test_a_function_may_be_named_and_take_keywords(call: Callable[..., torch.Tensor]) -> None:
    class Signed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(super().forward(x))

    assert_gradients_are_those_of_eager(Signed(4, 3))


def assert_gradients_are_those_of_eager(model: nn.Module) -> None:
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    joint = differentiate(capture(step, [])).joint
    known = dict(model.named_parameters()) | inputs
    with eager_control_flow():
        nn.functional.mse_loss(model(inputs["x"]), inputs["y"]).backward()
        results = joint.graph(*(known[a.name].detach() for a in joint.arguments))
    found = {r.name: t for r, t in zip(joint.results, results, strict=True)}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class Solution(torch.autograd.Function):
    """The solution of a linear system, with the adjoint system in the backward."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        solution = torch.linalg.solve(matrix, right)
        ctx.save_for_backward(matrix, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        matrix, solution = ctx.saved_tensors
        adjoint = torch.linalg.solve(matrix.T, gradient)
        return -adjoint @ solution.T, adjoint


class Root(torch.autograd.Function):
    """The root of `x**3 + x - a` by Newton's method, and its derivative by the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        def goes_on(count: torch.Tensor, x: torch.Tensor, change: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return (change > 1e-6) & (count < 50)

        def step(
            count: torch.Tensor, x: torch.Tensor, change: torch.Tensor, a: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            new = x - (x**3 + x - a) / (3 * x**2 + 1)
            return count + 1, new, (new - x).abs().max(), a.clone()

        _, root, *_ = while_loop(goes_on, step, (torch.tensor(0), torch.zeros_like(a), torch.tensor(1.0), a))
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (root,) = ctx.saved_tensors
        return gradient / (3 * root**2 + 1)


class Closed(torch.autograd.Function):
    """A loop that reads a tensor from around it."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        start = (torch.tensor(0), torch.zeros_like(a))
        return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x + a), start)[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class Implicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.matrix = nn.Linear(4, 3), nn.Parameter(torch.eye(3) + 0.1 * torch.rand(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Root.apply(Solution.apply(self.matrix, self.linear(x).T)).T


def test_a_function_may_solve_and_iterate() -> None:
    assert_gradients_are_those_of_eager(Implicit())


def test_a_loop_in_a_function_that_reads_a_tensor_from_around_it_is_refused_with_the_way_out() -> None:
    class Summed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Closed.apply(super().forward(x))

    with pytest.raises(
        CaptureError, match=r"test_autograd_functions\.py.*\n.*while_loop in Closed\.forward .* carried"
    ):
        assert_gradients_are_those_of_eager(Summed(4, 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return 2 * grad, None, None


class Tripled(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return 2 * grad, grad, None


class Scaled(nn.Linear):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__(4, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.function.apply(super().forward(x))
        return scaled


def test_a_backward_may_return_none_for_arguments_that_there_are_not() -> None:
    """As in PyTorch: a function keeps the None of an argument that was removed, as that of transformers' Reformer."""
    assert_gradients_are_those_of_eager(Scaled(Doubled))
    with pytest.raises(CaptureError, match="returns 3 gradients, and its forward takes 1 arguments"):
        assert_gradients_are_those_of_eager(Scaled(Tripled))


class Recomputed(torch.autograd.Function):
    """A checkpoint as older packages write it: its backward leaves gradients in the parameters of the layer."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y: torch.Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_a_backward_that_leaves_gradients_in_parameters_is_refused_with_the_way_out() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Recomputed.apply(self.second, self.first(x))
            return y

    with pytest.raises(CaptureError, match=r"(?s)backward\(y, grad\).*Recomputed.backward calls backward\(\) itself"):
        assert_gradients_are_those_of_eager(Layers())


def gradients_of_eager(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model that returns its loss, in its joint graph; those of eager have to be the same."""
    step = ig.TrainStep(model, None, torch.optim.SGD(model.parameters()), {"x": torch.randn(8, 4)})
    joint = differentiate(capture(step))
    values = {s.name: s.initial for s in joint.state} | dict(step.inputs)
    results = joint.joint.graph(*(values[a.name] for a in joint.joint.arguments))
    found = {r.name: t for r, t in zip(joint.joint.results, results, strict=True) if r.kind == "gradient"}
    model(step.inputs["x"]).backward()
    torch.testing.assert_close(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


class OfBothOutputs(torch.autograd.Function):
    """Its backward has a term of the gradient of each output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        second = x * 3
        ctx.mark_non_differentiable(second)
        return x * 2, second

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + second


class OfOutputsThatAreUsed(torch.autograd.Function):
    """Its backward is another one if its second output is unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        return 5 * first if second is None else 2 * first + 3 * second


class OfZeros(torch.autograd.Function):
    """Its backward gets zeros for an output that is unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + 3 * second + second.shape[0]


def _product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * second).mean()


def _only_first(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.square().mean()


@pytest.mark.parametrize(
    ("function", "loss"),
    [
        (OfBothOutputs, _product),
        (OfOutputsThatAreUsed, _only_first),
        (OfOutputsThatAreUsed, _product),
        (OfZeros, _only_first),
    ],
)
def test_a_backward_gets_the_gradients_that_eager_gives_it(
    function: type[torch.autograd.Function], loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    class Whole(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(*function.apply(super().forward(x)))

    model = Whole(4, 3)
    assert gradients_of_eager(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("needs", [True, False])
def test_a_reentrant_checkpoint_has_the_gradients_of_eager(*, needs: bool) -> None:
    """It gives its own parameters none unless an argument needs one."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            inside = checkpoint(lambda t: self.second(t).tanh(), h if needs else x, use_reentrant=True)
            return (h * inside).mean()

    model = Checkpointed()
    assert ("second.weight" in gradients_of_eager(model)) == needs
