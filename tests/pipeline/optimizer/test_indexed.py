"""Indices of rank 0, and masks, in `after_step` and in optimizers: values of the compiled step are those of eager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError

ROWS = 4


class History(nn.Module):
    """A linear layer, a history of its biases, and the place of the next row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("rows", torch.randn(ROWS, 3))
        self.register_buffer("cube", torch.randn(2, ROWS, 3))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.rows.sum(0) + self.cube.sum((0, 1))


def writes(m: History) -> None:
    m.rows[m.place % ROWS] = m.linear.bias
    m.place.add_(1)


def reads(m: History) -> None:
    m.linear.bias.add_(m.rows[m.place % ROWS], alpha=0.1)
    m.place.add_(3)


def adds(m: History) -> None:
    m.rows[m.place % ROWS] += m.linear.bias
    m.place.add_(1)


def changes_a_view(m: History) -> None:
    row = m.rows[m.place % ROWS]
    row.mul_(0.5).add_(m.linear.bias)
    m.place.sub_(1)


def of_several_dimensions(m: History) -> None:
    m.cube[1, m.place % ROWS] = m.linear.bias * 2
    m.cube[m.place % 2, :, 0] = 0.25
    m.cube[..., m.place % 3] -= 0.5
    m.place.add_(1)


def from_the_end(m: History) -> None:
    m.rows[-1 - m.place % ROWS] = m.rows[m.place % ROWS].clone()
    m.place.add_(1)


def parts_of_rows(m: History) -> None:
    m.rows[m.place % ROWS][0] = 0.5
    m.rows[0] = 0.25
    m.place[...] = m.place + 1


def views_of_rows(m: History) -> None:
    m.rows[m.place % ROWS][:2].mul_(0.5)
    m.rows[m.place % ROWS].view(3, 1)[1].add_(m.linear.bias[:1])
    m.rows[m.place % ROWS].detach().sub_(0.25)
    m.cube[m.place % 2][m.place % ROWS].mul_(0.5)
    m.place.add_(1)


def moves_in_between(m: History) -> None:
    row = m.rows[m.place % ROWS]
    m.place.add_(1)
    row.mul_(0.5)


def with_numbers(m: History, tau: float = 0.5) -> None:
    m.rows[m.place % ROWS] = m.linear.bias[None] * tau
    m.cube[0, m.place % ROWS, 1] = m.linear.bias[0] * tau
    m.place.add_(1)


def by_places(m: History) -> None:
    m.linear.weight.view(-1)[m.linear.weight.abs().argmin()] = 0
    m.rows.flatten()[m.rows.flatten().topk(2).indices] = 0.125


def by_mask(m: History) -> None:
    m.rows[m.rows > 0.5] = 0.125
    m.cube[:, torch.arange(ROWS) == m.place % ROWS] = -1.0
    m.place.add_(1)


def trains_as_eager(step: Callable[[History], ig.TrainStep], after: object, directory: object) -> None:
    ig.compile(step(History()), directory, entry_points=["train_step", "export_state"])
    session, model = load(directory), History()
    eager = step(model)
    x = torch.ones(5, 4)
    for _ in range(6):
        eager.optimizer.zero_grad()
        expected = eager.loss(model(x))
        expected.backward()
        eager.optimizer.step()
        with torch.no_grad():
            if callable(after):
                after(model)
        assert session.train_step(x=x.numpy()) == pytest.approx(expected.item(), rel=1e-4)
    state = session.state()
    for name, tensor in model.state_dict().items():
        assert np.allclose(state[name], tensor.numpy(), atol=1e-4), name


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


AFTER = [
    writes,
    reads,
    adds,
    changes_a_view,
    of_several_dimensions,
    from_the_end,
    parts_of_rows,
    views_of_rows,
    moves_in_between,
]
AFTER += [with_numbers, by_places, by_mask]


@pytest.mark.parametrize("after", AFTER)
def test_after_step_trains_as_eager(after, tmp_path):
    def step(model: History) -> ig.TrainStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ig.TrainStep(model, loss, optimizer, {"x": torch.ones(5, 4)}, after_step=after)

    trains_as_eager(step, after, tmp_path / "net")


class Averaged(torch.optim.Optimizer):
    """Steps by the mean of the last gradients, which it keeps in a ring."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["ring"], state["place"] = torch.zeros(ROWS, *p.shape), torch.tensor(0)
                state["ring"][state["place"] % ROWS] = p.grad
                state["place"] += 1
                p.sub_(state["ring"].mean(0), alpha=group["lr"])


def test_an_optimizer_trains_as_eager(tmp_path):
    def step(model: History) -> ig.TrainStep:
        return ig.TrainStep(model, loss, Averaged(model.parameters(), lr=0.1), {"x": torch.ones(5, 4)})

    trains_as_eager(step, None, tmp_path / "net")


def reads_before_a_change(m: History) -> None:
    row = m.rows[m.place % ROWS].detach()
    m.rows.mul_(0.5)
    m.linear.bias.add_(row)


def selects_by_a_number(m: History) -> None:
    m.rows.select(0, m.place % ROWS).mul_(0.5)


REFUSED = {
    reads_before_a_change: r"linear\.bias\.add_\(row\)(.|\n)*before x changed",
    selects_by_a_number: r"m\.rows\.select(.|\n)*takes a number",
}


@pytest.mark.parametrize("after", REFUSED)
def test_what_a_trace_cannot_do_as_eager_is_refused(after, tmp_path):
    model = History()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, loss, optimizer, {"x": torch.ones(5, 4)}, after_step=after)
    with pytest.raises(CaptureError, match=REFUSED[after]):
        ig.compile(step, tmp_path / "net")


class OfBytes(History):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor([0, 5], dtype=dtype))
        self.register_buffer("bytes", torch.tensor([250, 7]).to(dtype))


def counts(m: OfBytes) -> None:
    m.rows[(m.places % ROWS).long()] = m.linear.bias
    m.places.copy_((m.places + 1) % 5)
    m.bytes.copy_(-(m.bytes * 3) // 2)
    m.bytes.add_(m.places).clamp_(min=3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_small_integers_are_those_of_eager(dtype, tmp_path):
    model, eager = OfBytes(dtype), OfBytes(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, loss, optimizer, {"x": torch.ones(5, 4)}, after_step=counts)
    ig.compile(step, tmp_path / "net", entry_points=["train_step", "export_state"])
    session = load(tmp_path / "net")
    for _ in range(8):
        session.train_step(x=np.ones((5, 4), np.float32))
        counts(eager.requires_grad_(False))
    state = session.state()
    assert np.array_equal(state["places"], eager.places.numpy())
    assert np.array_equal(state["bytes"], eager.bytes.numpy())
