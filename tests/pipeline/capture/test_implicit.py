"""Layers that solve an equation: their gradients solve the adjoint equation, and equal those of the unrolled solver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import Function
from torch.func import jacrev, vjp, vmap
from torch.nn import functional

import irongrad as ig

ITERATIONS = 30  # the map contracts: after these, float32 does not change any more


def cell(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(z @ weight.t() + x)


def unrolled(x: Tensor, weight: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(ITERATIONS):
        z = cell(z, x, weight)
    return z


def converged(x: Tensor, weight: Tensor) -> Tensor:
    """Iterates until the state changes no more."""

    def goes_on(number: Tensor, z: Tensor, change: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return (change > 1e-7) & (number < 100)

    def step(number: Tensor, z: Tensor, change: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        new = cell(z, x, weight)
        return number + 1, new, (new - z).abs().max(), x.clone(), weight.clone()

    start = (torch.tensor(0), torch.zeros_like(x), torch.ones((), dtype=x.dtype), x, weight)
    return while_loop(goes_on, step, start)[1]


class FixedPoint(Function):
    """Solves z = cell(z); the backward iterates w = J^T w + g, by the gradient of one step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = unrolled(x, weight)
        ctx.save_for_backward(z, x, weight)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        z, x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = cell(z, x, weight)
        w = gradient
        for _ in range(ITERATIONS):
            w = torch.autograd.grad(y, z, w, retain_graph=True)[0] + gradient
        return torch.autograd.grad(y, (x, weight), w)


class Root(FixedPoint):
    """Solves z - cell(z) = 0; the backward solves one linear system for each row."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        z, x, weight = ctx.saved_tensors
        jacobians = vmap(jacrev(lambda z, x: z - cell(z, x, weight)))(z, x)
        w = torch.linalg.solve(jacobians.transpose(1, 2), gradient.unsqueeze(-1)).squeeze(-1)
        return vjp(lambda x, weight: cell(z, x, weight), x, weight)[1](w)


class UntilConverged(Root):
    """Solves by a loop that ends when the state changes no more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = converged(x, weight)
        ctx.save_for_backward(z, x, weight)
        return z


class Equilibrium(nn.Module):
    """A deep equilibrium model (Bai, Kolter and Koltun, arXiv:1909.01377) with the solver `layer`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(4, 4) * 0.2)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x), self.weight))


@pytest.mark.parametrize("solver", [FixedPoint, Root, UntilConverged])
def test_a_layer_that_solves_an_equation_trains_as_the_unrolled_solver(solver: type[Function], tmp_path: Path) -> None:
    model, twin = Equilibrium(solver.apply), Equilibrium(unrolled).double()
    inputs = {"x": torch.randn(5, 3), "y": torch.randn(5, 2)}
    step = ig.TrainStep(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.5), inputs)
    session = ig.compile(step, tmp_path / "step", entry_points=["train_step"]).load()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(4):
        loss = functional.mse_loss(twin(inputs["x"].double()), inputs["y"].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = session.train_step(**{n: t.numpy() for n, t in inputs.items()})
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    for name, value in twin.named_parameters():
        np.testing.assert_allclose(session.state()[name], value.detach(), rtol=1e-4, atol=1e-6)
