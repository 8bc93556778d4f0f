"""The indices of an update are proved, and those of a forward whose buffers `after_step` changes are checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError, CaptureError, GuardError


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


@pytest.mark.parametrize("dynamic", [{}, {"x": {0: "batch"}}], ids=["fixed", "open"])
@pytest.mark.parametrize("entry", ["train_steps", "train_and_export"])
def test_each_of_several_steps_checks_its_own_index(entry, dynamic, tmp_path):
    inputs = {"x": torch.ones(5, 4)}
    model = Reads()
    step = ig.TrainStep(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs, after_step=moves, dynamic=dynamic
    )
    ig.compile(step, tmp_path / "net", entry_points=["train_step", entry, "export_state", "import_state", "reset"])
    session, alone = load(tmp_path / "net"), load(tmp_path / "net")
    x = np.random.default_rng(0).standard_normal((6, 5, 4)).astype(np.float32)

    def call(inputs: np.ndarray) -> np.ndarray:
        outputs = session.call(entry, x=inputs)
        return outputs["losses"] if isinstance(outputs, dict) else outputs

    assert np.array_equal(call(x[:3]), [alone.train_step(x=one) for one in x[:3]])
    alone.train_step(x=x[3])
    with pytest.raises(GuardError, match=r"self\.queue\[self\.place\]"):
        call(x[3:])
    state = alone.state()
    assert state["place"] == 4
    assert all(np.array_equal(state[name], now) for name, now in session.state().items())


WITHIN: dict[str, Callable[[Queue], torch.Tensor]] = {
    "remainder": lambda m: m.queue[m.place % 4],
    "clamp": lambda m: m.queue[m.place.clamp(0, 3)],
    "bits": lambda m: m.queue[m.place & 3],
    "mask": lambda m: m.queue * (m.order == m.place).float().unsqueeze(1),
}


class Within(Queue):
    """Reads the queue at a place that is within it, whatever the buffer holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + WITHIN[self.name](self).sum(0)


@pytest.mark.parametrize("after", [None, moves])
@pytest.mark.parametrize("name", WITHIN)
def test_nothing_is_relied_on_for_an_index_that_is_within_by_itself(name, after, tmp_path):
    ig.compile(made(Within(name), after), tmp_path / "net", entry_points=["train_step", "import_state", "reset"])
    session = load(tmp_path / "net")
    assert "place" not in session.manifest.relied
    session.update_state({"place": np.array([9])})
    model = Within(name)
    model.place.fill_(9)
    for _ in range(2):
        x = torch.ones(5, 4)
        assert session.train_step(x=x.numpy()) == pytest.approx(loss(model(x)).item(), rel=1e-5)
        session.reset()
        session.update_state({"place": np.array([9])})


def test_an_index_that_another_step_moves_is_checked(tmp_path):
    reads = Reads()
    writes = Reads()
    writes.queue, writes.place = reads.queue, reads.place
    steps = ig.Steps({"reads": made(reads, None), "writes": made(writes, moves)})
    ig.compile(steps, tmp_path / "net")
    session = load(tmp_path / "net")
    x = np.ones((5, 4), np.float32)
    for _ in range(4):
        session.step("reads").train_step(x=x)
        session.step("writes").train_step(x=x)
    with pytest.raises(GuardError, match=r"self\.queue\[self\.place\]"):
        session.step("reads").train_step(x=x)


def keeps(model: Queue) -> None:
    model.queue[model.place] = model.linear.bias.detach() + 1
    model.place.copy_((model.place + 1) % 4)


def rolls(model: Queue) -> None:
    model.queue[model.order[:1]] = model.linear.bias.detach() + 1
    model.order.copy_(model.order.roll(1))


def counts_in_an_element(model: Queue) -> None:
    model.queue[model.place[0]] = model.linear.bias.detach() + 1
    model.place[0] = (model.place[0] + 1) % 4


class Keeps(Queue):
    """Writes its queue in the forward, as MoCo does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.queue[self.place] = x[0, :3].detach()
            self.place.copy_((self.place + 1) % 4)
        return self.linear(x) + self.queue.sum(0)


@pytest.mark.parametrize(
    ("model", "after", "name"),
    [(Queue, keeps, "place"), (Queue, rolls, "order"), (Queue, counts_in_an_element, "place"), (Keeps, None, "place")],
)
def test_an_index_may_be_kept_in_range_by_its_own_update(model, after, name, tmp_path):
    ig.compile(made(model(), after), tmp_path / "net")
    session = load(tmp_path / "net")
    eager = model()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(6):
        x = torch.randn(5, 4)
        optimizer.zero_grad()
        expected = loss(eager(x))
        expected.backward()
        optimizer.step()
        with torch.no_grad():
            (after or (lambda model: None))(eager)
        assert session.train_step(x=x.numpy()) == pytest.approx(expected.item(), rel=1e-4)
    state = session.state()
    assert np.array_equal(state[name], getattr(eager, name).numpy())
    assert np.allclose(state["queue"], eager.queue.numpy(), atol=1e-4)
    assert session.manifest.relied[name].bounds == (0, 3)
    session.update_state({name: np.flip(state[name])})
    with pytest.raises(ArtifactError, match=rf"{name} outside of \[0, 3\]"):
        session.update_state({name: state[name] + 4})


def rarely_leaves(model: Queue) -> None:
    model.queue[model.place] = model.linear.bias.detach() + 1
    model.place.copy_(torch.where(model.linear.bias[0] > 1e3, 10**9, (model.place + 1) % 4))


def of_one_row(model: Queue) -> None:
    model.queue[:1][model.place] = model.linear.bias.detach()


@pytest.mark.parametrize(("model", "after"), [(Queue, rarely_leaves), (Keeps, of_one_row)])
def test_an_index_that_its_update_does_not_keep_in_range_is_refused(model, after, tmp_path):
    with pytest.raises(CaptureError, match=r"model\.queue(.|\n)*not proved to be in"):
        ig.compile(made(model(), after), tmp_path / "net")


def test_an_index_is_kept_in_range_by_an_update_after_every_other_step(tmp_path):
    model = Queue()
    model.place.fill_(3)
    ig.compile(made(model, ig.every(2, keeps)), tmp_path / "net", entry_points=["train_step", "export_state"])
    assert load(tmp_path / "net").manifest.relied["place"].bounds == (0, 3)


@pytest.mark.parametrize("names", [["keeps", "reads"], ["reads", "keeps"]])
def test_two_steps_rely_on_what_both_bounds_allow(names, tmp_path):
    one, other = Keeps(), Queue()
    other.place = one.place
    steps = {"keeps": made(one, None), "reads": made(other, of_one_row)}
    with pytest.raises(CaptureError, match="another step changes"):
        ig.compile(ig.Steps({name: steps[name] for name in names}), tmp_path / "net")


def follows(model: Queue) -> None:
    model.queue[model.place] = model.linear.bias.detach() + 1
    model.place.copy_(model.order[:1])
    model.order.copy_(model.order.roll(1))


def swaps(model: Queue) -> None:
    model.queue[model.place] = model.linear.bias.detach() + 1
    before = model.place.clone()
    model.place.copy_(model.order[:1])
    model.order.copy_(torch.cat([model.order[1:], before + 1]))


def test_what_keeps_an_index_in_range_is_relied_on_too(tmp_path):
    ig.compile(made(Queue(), follows), tmp_path / "net")
    session = load(tmp_path / "net")
    assert {name: spec.bounds for name, spec in session.manifest.relied.items()} == {"place": (0, 3), "order": (0, 3)}
    with pytest.raises(ArtifactError, match=r"order outside of \[0, 3\]"):
        session.update_state({"order": np.array([0, 1, 2, 4])})
    with pytest.raises(CaptureError, match=r"model\.queue\[model\.place\] = "):
        ig.compile(made(Queue(), swaps), tmp_path / "other")


def test_another_step_may_not_change_such_an_index(tmp_path):
    one, other = Queue(), Queue()
    other.place = one.place
    steps = ig.Steps({"keeps": made(one, keeps), "moves": made(other, moves)})
    with pytest.raises(CaptureError, match=r"model\.queue\[model\.place\] = (.|\n)*another step changes"):
        ig.compile(steps, tmp_path / "net")


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
