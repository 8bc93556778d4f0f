"""SAM's two passes in one step: as a script with two backward passes trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError, GuardError


def make_step(**changed: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = {"x": torch.randn(12, 5), "y": torch.randint(0, 3, (12,))}
    return ig.TrainStep(model, cross_entropy, optimizer, inputs, **changed)


def train_eagerly(step: ig.TrainStep, rho: float, *, adaptive: bool) -> float:
    """The two passes of github.com/davda54/sam, by hand."""
    (optimizer,) = step.optimizers
    x, y = step.inputs["x"], step.inputs["y"]
    optimizer.zero_grad()
    first = cross_entropy(step.model(x), y)
    first.backward()
    parameters = [p for p in step.model.parameters() if p.grad is not None]
    with torch.no_grad():
        weighted = [(p.abs() if adaptive else 1.0) * p.grad for p in parameters]
        scale = rho / (torch.stack([w.norm(p=2) for w in weighted]).norm(p=2) + 1e-12)
        moves = [(p.pow(2) if adaptive else 1.0) * p.grad * scale for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    cross_entropy(step.model(x), y).backward()
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    return first.item()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_step_is_that_of_two_passes(adaptive: bool, tmp_path: Path) -> None:
    step = make_step(sam=ig.SAM(rho=0.5, adaptive=adaptive))
    ig.compile(step, tmp_path / "net")
    with load(tmp_path / "net") as session:
        for _ in range(4):
            assert session.train_step(**step.inputs) == pytest.approx(
                train_eagerly(step, 0.5, adaptive=adaptive), abs=1e-5
            )
        state = session.state()
        for name, tensor in step.model.state_dict().items():
            torch.testing.assert_close(torch.as_tensor(state[name]), tensor, atol=1e-5, rtol=1e-5)


def test_what_sam_does_not_take_is_refused() -> None:
    with pytest.raises(CaptureError, match="rho is -1"):
        ig.SAM(-1)
    with pytest.raises(CaptureError, match="sam is a float; it must be an irongrad.SAM"):
        make_step(sam=0.05)
    with pytest.raises(CaptureError, match="leave out accumulate"):
        make_step(sam=ig.SAM(), accumulate=2)


class Looked(nn.Module):
    """Adds rows of a table at places that each call has to check."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(5, 3), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table[2 * i]


def test_indices_of_both_passes_are_checked(tmp_path: Path) -> None:
    model = Looked()
    inputs = {"x": torch.randn(4, 5), "i": torch.tensor([0, 3, 1, 2]), "y": torch.tensor([0, 1, 2, 0])}
    step = ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs, sam=ig.SAM())
    ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    with load(tmp_path / "net") as session:
        expected = cross_entropy(model(inputs["x"], inputs["i"]), inputs["y"]).item()
        assert session.train_step(**inputs) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(GuardError, match=r"self\.table\[2 \* i\]"):
            session.train_step(**{**inputs, "i": torch.tensor([0, 4, 1, 2])})
