"""The indices of an update are proved, and those of a forward whose buffers `after_step` changes are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError, GuardError


class Queue(nn.Module):
    """A linear layer, and a queue of rows with the place of the next one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.queue.sum(0)


class Reads(Queue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.queue[self.place]


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def made(model: nn.Module, after: object) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, loss, optimizer, {"x": torch.ones(5, 4)}, after_step=after)


def unproved(model: Queue) -> None:
    model.queue[model.place] = model.linear.bias.detach()
    model.place.add_(1)


def by_remainder(model: Queue) -> None:
    model.queue[model.place % 4] = model.linear.bias.detach() + 1
    model.place.add_(1)


def by_a_frozen_buffer(model: Queue) -> None:
    model.queue[model.order[:2]] = model.linear.bias.detach() + 1


def moves(model: Queue) -> None:
    model.place.add_(1)


def test_an_index_of_after_step_has_to_be_proved(tmp_path):
    with pytest.raises(CaptureError, match=r"model\.queue\[model\.place\] = (.|\n)*index % size"):
        ig.compile(made(Queue(), unproved), tmp_path / "net")


@pytest.mark.parametrize("after", [by_remainder, by_a_frozen_buffer])
def test_a_proved_index_trains_as_eager(after, tmp_path):
    ig.compile(made(Queue(), after), tmp_path / "net")
    session = load(tmp_path / "net")
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(5, 4)
    for _ in range(6):
        optimizer.zero_grad()
        expected = loss(model(x))
        expected.backward()
        optimizer.step()
        with torch.no_grad():
            after(model)
        assert session.train_step(x=x.numpy()) == pytest.approx(expected.item(), rel=1e-4)
    assert np.allclose(session.state()["queue"], model.queue.numpy(), atol=1e-4)
    bounds = {name: spec.bounds for name, spec in session.manifest.relied.items()}
    assert bounds == ({"order": (0, 2)} if after is by_a_frozen_buffer else {}) or bounds == {"order": (0, 3)}


def test_an_index_that_after_step_moves_is_checked_in_each_call(tmp_path):
    ig.compile(made(Reads(), moves), tmp_path / "net")
    session = load(tmp_path / "net")
    x = np.ones((5, 4), np.float32)
    for _ in range(4):
        session.train_step(x=x)
    before = session.state()
    with pytest.raises(GuardError, match=r"self\.queue\[self\.place\]"):
        session.train_step(x=x)
    assert all(np.array_equal(before[name], now) for name, now in session.state().items())


class Sorted(torch.optim.SGD):
    """Adds a fixed number to rows by an index that it computes from the gradient."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows = (p.grad.abs() * 1e-6).long().flatten()[:1]
                with torch.no_grad():
                    p[rows] -= group["lr"] * p.grad[rows]


def test_an_index_of_an_optimizer_has_to_be_proved(tmp_path):
    model = nn.Linear(4, 3)
    step = ig.TrainStep(model, loss, Sorted(model.parameters(), lr=0.1), {"x": torch.ones(5, 4) * 1e-5})
    with pytest.raises(CaptureError, match="is not proved to be in"):
        ig.compile(step, tmp_path / "net")
