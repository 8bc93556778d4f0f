"""Rows that a mask selects compile where each row is computed by itself, or where all of them are reduced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import irongrad as ig
from irongrad.runtime.errors import UserError


class Masked(nn.Module):
    """A model whose loss uses rows that a mask of its own values selects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))


class Written(Masked):
    def forward(self, x, y):
        h = self.linear(x)
        outside, out = h.abs() > 0.5, torch.zeros_like(h)
        out[outside] = h[outside]
        inside = ~outside
        out[inside] = h[inside].mul(self.scale).tanh() * 2 + 1
        return functional.mse_loss(out, y)


class Logarithm(Masked):
    """The gradient of the logarithm is infinite where the mask hides a zero."""

    def forward(self, x, y):
        h = (self.linear(x) - 0.1).relu()
        positive, out = h > 0.1, torch.zeros_like(h)
        out[positive] = torch.log(h[positive] * self.scale) + y.mean()
        return out.square().mean()


class ComparedTwice(Masked):
    def forward(self, x, y):
        h = self.linear(x)
        out = torch.zeros_like(h)
        out[(h > 0) & (y < 1)] = h[(h > 0) & (y < 1)].tanh()
        return functional.mse_loss(out, y)


class ComparedAfterAWrite(Masked):
    def forward(self, x, y):
        h = self.linear(x) + 0
        chosen = h[h > 0]
        h[:, 0] += 1
        h[h > 0] = chosen
        return functional.mse_loss(h, y)


class WholeRows(Masked):
    def forward(self, x, y):
        chosen = y[:, 0] > 0
        h = torch.zeros(8, 3)
        h[chosen] = (self.linear(x)[chosen] + self.linear.bias).sigmoid()
        return functional.mse_loss(h, y)


class Reduced(Masked):
    def forward(self, x, y):
        chosen = y[:, 0] > 0
        h = self.linear(x)
        return h[chosen].square().mean() + 0.1 * h[h > 0].sum() + functional.mse_loss(h[chosen], y[chosen])


class MaskedSelect(Masked):
    """Its masks are broadcast."""

    def forward(self, x, y):
        h = self.linear(x)
        chosen = (h * self.scale).masked_select(y[:, :1] > 0)
        return chosen.square().mean() + torch.masked_select(h, h > 0).sum() * 0.1


class Classes(Masked):
    def forward(self, x, y):
        target, chosen = y.argmax(1), y[:, 0] > 0
        target = torch.where(y[:, 1] > 1, -100, target)
        return functional.cross_entropy(self.linear(x)[chosen], target[chosen])


class Sorted(Masked):
    def forward(self, x, y):
        h = self.linear(x)
        return h[h > 0].sort().values[0] + y.sum()


class Counted(Masked):
    def forward(self, x, y):
        h = self.linear(x)
        return h[h > 0].sum() / h[h > 0].shape[0] + y.sum()


def step_of(make: type[Masked]) -> ig.TrainStep:
    model = make()
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    return ig.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


@pytest.mark.parametrize("make", [Written, Logarithm, ComparedTwice, WholeRows, Reduced, MaskedSelect, Classes])
def test_selected_rows_train_as_in_eager(make: type[Masked], tmp_path: Path) -> None:
    session = ig.compile(step_of(make), tmp_path / "step", entry_points=["train_step"]).load()
    step = step_of(make)
    for number in range(4):
        rng = np.random.default_rng(number)
        batch = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in step.inputs.items()}
        session.train_step(**batch)
        step.optimizers[0].zero_grad()
        step.model(*map(torch.from_numpy, batch.values())).backward()
        step.optimizers[0].step()
        found = session.state()
        for name, value in step.model.state_dict().items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=2e-5, atol=2e-6, err_msg=f"{number}: {name}")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Sorted, "h[h > 0].sort()"),
        (Counted, "h[h > 0].shape[0]"),
        (ComparedAfterAWrite, "h[h > 0] = chosen"),
    ],
)
def test_what_needs_the_number_of_rows_is_refused(make: type[Masked], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        ig.compile(step_of(make), "unwritten")
    assert line in str(refusal.value)


def test_a_function_that_returns_selected_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"x\[x > 0\]"):
        ig.compile_function(lambda x: x[x > 0] * 2, (torch.randn(4),))
