"""Capture takes Python decisions on constants as eager does, and refuses decisions on values that a step may change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.eager_runs import Found
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import CaptureError, GuardError, UserError

Compile = Callable[..., Artifact]
KEPT = torch.tensor([True, False, True])


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("times", torch.linspace(0, 1, 3))
        self.register_buffer("count", torch.tensor(0))


class Reads(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (self.times[1:] > self.times[:-1]).all()
        h = self.linear(x)
        made = torch.zeros(4)
        view = made[1:]
        made[2] = 3.0
        if view.sum() > 2 and torch.equal(h, h):
            h = h + view[1]
        for i in torch.arange(2):
            h = h * h[int(i)]
        return h.sum(torch.arange(1, h.ndim).tolist(), keepdim=True) + h * float(self.times[1])


class Picks(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        pairs = torch.ones(8, 8).triu(1).nonzero()
        apart = (h[pairs[:, 0]] - h[pairs[:, 1]]).square().mean()
        others = (h @ h.T)[~torch.eye(8, dtype=torch.bool)].view(8, -1)
        chosen = torch.masked_select(h, torch.eye(8, 3, dtype=torch.bool))
        repeated = h[:, torch.repeat_interleave(torch.arange(3), torch.tensor([1, 0, 2]))]
        h = h.clone()
        h[:, ~KEPT] = 0.5
        return h * apart + others.mean() + chosen.sum() + repeated + h[:, KEPT].mean()


def step_of(model: nn.Module) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, mse_loss, optimizer, {"x": torch.randn(8, 4), "y": torch.randn(8, 3)})


@pytest.mark.parametrize("kind", [Reads, Picks])
def test_constants_have_values_during_the_capture(kind: type[nn.Module], compiled: Compile) -> None:
    torch.manual_seed(0)
    compiled(step_of(kind()), "train_step", "eval_step")


class OfInput(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(8, 2)
        view = made[:, 0]
        made[:, 0] = x[:, 0]
        return self.linear(x if view.sum() > 0 else -x)  # here


class OfDraw(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if torch.rand(3).sum() > 1 else -x)  # here


class OfGarbage(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if torch.empty(3).sum() > 1 else -x)  # here


class OfChangingBuffer(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count == 0:  # here
            x = -x
        self.count += 1
        return self.linear(x)


class OfBufferChangedInTraining(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        elif self.count == 0:  # here
            x = -x
        return self.linear(x)


class OfBufferChangedInEvaluation(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.count += 1
        elif self.count == 0:  # here
            x = -x
        return self.linear(x)


class OfParameter(Known):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.linear.bias.sum() > 0 else -x)  # here


@pytest.mark.parametrize(
    "kind",
    [OfInput, OfDraw, OfGarbage, OfChangingBuffer, OfBufferChangedInTraining, OfBufferChangedInEvaluation, OfParameter],
)
def test_a_decision_on_a_value_that_a_step_may_change_is_refused(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irongrad.pipeline.capture.capture.run_twice", lambda *arguments: Found())
    with pytest.raises(CaptureError) as caught:
        capture(step_of(kind()))
    lines, start = inspect.getsourcelines(kind)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    assert str(caught.value).startswith(f"{__file__}:{line}:")
    assert "a Python decision" in str(caught.value)


class Queue(nn.Module):
    """MoCo's queue of keys (https://arxiv.org/abs/1911.05722), with the place of the next key in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("keys", torch.randn(5, 3))
        self.register_buffer("start", torch.zeros(1, dtype=torch.long))

    def put(self, keys: torch.Tensor) -> None:
        start = int(self.start)  # here
        self.keys[start : start + 2] = keys
        self.start[0] = (start + 2) % 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.linear(x)
        with torch.no_grad():
            self.put(queries + 1)
        return queries @ self.keys.T.clone()


class QueueByIndices(Queue):
    def put(self, keys: torch.Tensor) -> None:
        self.keys[(self.start + torch.arange(2)) % 5] = keys
        self.start[0] = (self.start[0] + 2) % 5


def step_of_queue(model: Queue) -> ig.TrainStep:
    inputs = {"x": torch.randn(2, 4), "y": torch.randn(2, 5)}
    return ig.TrainStep(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def test_a_place_from_a_changing_buffer_is_refused_with_its_spelling_by_indices(compiled: Compile) -> None:
    lines, start = inspect.getsourcelines(Queue)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    with pytest.raises(CaptureError, match=r"a place with indices") as caught:
        capture(step_of_queue(Queue()))
    assert str(caught.value).startswith(f"{__file__}:{line}:")
    torch.manual_seed(0)
    step = step_of_queue(QueueByIndices())  # the start wraps within its three golden steps
    session = compiled(step, "train_step").load()
    for _ in range(4):
        session.train_step(**{n: t.numpy() for n, t in step.inputs.items()})
    assert session.state()["start"] == 3


class Classes(Known):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * one_hot(i, 3)


def test_one_hot_has_a_guard_in_place_of_an_assertion(compiled: Compile) -> None:
    torch.manual_seed(0)
    model = Classes()
    inputs = {"x": torch.randn(8, 4), "i": torch.arange(8) % 3, "y": torch.randn(8, 3)}
    step = ig.TrainStep(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    session = compiled(step, "train_step").load()
    with pytest.raises(GuardError, match="'?i'?"):
        session.train_step(**{n: t.numpy() for n, t in inputs.items()} | {"i": np.full(8, 3)})


class Averages(Known):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.image = nn.BatchNorm1d(4, momentum=None), nn.BatchNorm2d(2, momentum=None, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x) + self.image(x.view(8, 2, 2, 1)).view(8, 4))


def test_batch_norm_averages_over_all_steps(compiled: Compile) -> None:
    torch.manual_seed(0)
    compiled(step_of(Averages()), "train_step", "eval_step")


def test_a_shape_that_depends_on_an_input_is_refused() -> None:
    class Masks(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[x[:, 0] > 0].cumsum(0).mean()

    with pytest.raises(UserError, match="depends on values"):
        capture(step_of(Masks()))


def test_values_taken_and_put_back_by_a_mask_are_refused_with_the_way_out() -> None:
    class Splits(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            out = torch.zeros_like(h)
            out[h > 0] = h[h > 0].cumsum(0)
            return out

    with pytest.raises(UserError, match=r"out = torch.where\(mask, f\(x\), out\)"):
        capture(step_of(Splits()))


def test_a_tensor_of_ones_is_known_whatever_it_is_like() -> None:
    class Unmasked(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(x, dtype=torch.uint8)
            assert mask[0].all()
            assert not x.new_zeros(3).any()
            return self.linear(x)

    class Masked(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.full_like(x, x.sum())[0].all()
            return self.linear(x)

    capture(step_of(Unmasked()))
    with pytest.raises(UserError, match="full_like"):
        capture(step_of(Masked()))


def test_a_loss_of_one_element_may_have_dimensions(compiled: Compile) -> None:
    step = step_of(nn.Linear(4, 3))
    compiled(replace(step, loss=lambda output, y: mse_loss(output, y).reshape(1, 1)), "train_step")


def test_tensors_that_are_computed_alike_are_equal() -> None:
    class Compares(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            return h if torch.equal(h[:, None] * 2, h[:, None] * 2) and torch.equal(x, x[:]) else h.new_zeros(8, 3)

    class ComparesAfterAWrite(Known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x) + 0
            before = h * 2
            h += 1
            return h if torch.equal(before, h * 2) else 2 * h

    capture(step_of(Compares()))
    with pytest.raises(UserError, match="torch.equal"):
        capture(step_of(ComparesAfterAWrite()))
