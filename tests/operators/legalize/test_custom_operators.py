"""Custom operators and torch.autograd.Function, in functions and in training steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import registry
from irongrad.runtime.errors import UnsupportedOpError, UserError, VerificationError


@torch.library.custom_op("irongrad_test::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    """An operator without a fake kernel and without an autograd formula."""
    return torch.from_numpy(x.detach().numpy() ** 2)


@torch.library.custom_op("irongrad_test::scaled_cube", mutates_args=())
def scaled_cube(x: torch.Tensor, scale: float) -> torch.Tensor:
    """An operator with both; its formula has the factor 4 instead of 3, which shows that the formula was used."""
    return torch.from_numpy(x.detach().numpy() ** 3) * scale


@scaled_cube.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.x, ctx.scale = inputs


def _backward(ctx, gradient):
    return gradient * 4 * ctx.x * ctx.x * ctx.scale, None


scaled_cube.register_autograd(_backward, setup_context=_keep)

torch.library.define("irongrad_test::shifted", "(Tensor x) -> Tensor")
torch.library.impl(
    "irongrad_test::shifted", "CompositeExplicitAutograd", lambda x: torch.from_numpy(x.detach().numpy() + 1)
)


class Wrong(torch.autograd.Function):
    """The sine with a wrong derivative, 7, which shows that `backward` was used."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Several(torch.autograd.Function):
    """A function with several outputs, one an integer and one an argument, and with a constant argument."""

    @staticmethod
    def forward(x, scale):
        return x * scale, x.argmax(), x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, gradient, _, other):
        return gradient * ctx.scale * ctx.saved_tensors[0] + other, None


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers decompositions for all three operators during one test."""
    monkeypatch.setattr(registry, "_USER", {})
    ig.register_decomposition(square)(lambda x: x * x)
    ig.register_decomposition(torch.ops.irongrad_test.scaled_cube)(lambda x, scale: x * x * x * scale)

    @ig.register_decomposition(torch.ops.irongrad_test.shifted.default)
    def shifted(x):
        return x + 1


def everything(x):
    shifted = torch.ops.irongrad_test.shifted(x)
    first, index, same = Several.apply(x, 3.0)
    return (square(x) + scaled_cube(x, 2.0) + shifted + Wrong.apply(x) + first + index + same).sum()


def test_gradients_come_from_the_registered_formulas(registered):
    x = np.array([0.5, 1.0, 2.0], np.float32)
    value, (gradient,) = ig.compile_function(everything, [torch.rand(3)], gradients=True)(x)
    expected = x**2 + 2 * x**3 + (x + 1) + np.sin(x) + 3 * x + 2 + x
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x + 8 * x * x + 1 + 7 + 9 * x + 1, rtol=1e-5)


def test_values_of_a_function_are_compared_with_the_operators_themselves(registered):
    x = np.array([0.5, 1.0, 2.0], np.float32)
    compiled = ig.compile_function(lambda x: square(x) + torch.ops.irongrad_test.shifted(x), [torch.rand(3)])
    np.testing.assert_allclose(compiled(x), x * x + x + 1, rtol=1e-6)
    ig.register_decomposition(square)(lambda x: x * x * 1.001)
    with pytest.raises(VerificationError):
        ig.compile_function(lambda x: square(x), [torch.rand(3)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return everything(self.linear(x))


def test_a_training_step_with_custom_operators_is_verified(registered, tmp_path):
    """Compiling verifies the step against eager, whose gradients use the same formulas."""
    model = Model()
    step = ig.TrainStep(model, lambda out: out, torch.optim.SGD(model.parameters(), lr=0.1), {"x": torch.rand(2, 3)})
    artifact = ig.compile(step, tmp_path / "out", entry_points=("train_step", "predict"))
    assert artifact.reports["llvm-cpu"].passed


@pytest.mark.parametrize("gradients", [False, True])
def test_a_custom_operator_without_a_decomposition_is_refused(gradients):
    for function, name in [(lambda x: square(x).sum(), "square"), (lambda x: scaled_cube(x, 1.0).sum(), "scaled_cube")]:
        with pytest.raises(UnsupportedOpError) as caught:
            ig.compile_function(function, [torch.rand(3)], gradients=gradients)
        assert f"irongrad_test.{name}" in str(caught.value)
        assert "irongrad.register_decomposition(torch.ops.irongrad_test." in str(caught.value)
        assert f"{__file__}:" in str(caught.value)


def test_functions_and_supported_operators_cannot_be_registered():
    with pytest.raises(UserError, match="is no operator"):
        ig.register_decomposition(torch.sin)
    with pytest.raises(UserError, match=r"has a decomposition in irongrad.operators.decompositions\."):
        ig.register_decomposition(torch.ops.aten.mm)
