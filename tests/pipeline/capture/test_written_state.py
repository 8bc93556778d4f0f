"""A forward writes into buffers and into parameters that no optimizer updates, also through `.data`, as in eager."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div, mse_loss

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.side_effects import written_state
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import CaptureError

Compile = Callable[..., Artifact]


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(4, 3)
        self.target = copy.deepcopy(self.online)
        self.register_buffer("mean", torch.zeros(3))


class AverageInPlace(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, trained in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(trained, 0.1)
            goal = self.target(x)
        return self.online(x) - 0.9 * goal


class AverageByData(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mine, trained in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.mul_(0.9).add_(trained.data, alpha=0.1)
        return self.online(x) - 0.9 * self.target(x)


class AverageOfLists(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = list(self.target.parameters())
        with torch.no_grad():
            torch._foreach_mul_(mine, 0.9)
            torch._foreach_add_(mine, list(self.online.parameters()), alpha=0.1)
        return self.online(x) - 0.9 * self.target(x).detach()


class Swapped(Written):
    """Two buffers take each other's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("older", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean, self.older = self.older, self.mean
        return self.online(x) - self.mean - 0.5 * self.target(x)


class AssignedData(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.online(x)
        self.mean.data = 0.9 * self.mean.data + 0.1 * h.data.mean(0)
        self.target.weight.data = self.mean.data[:, None] * self.target.weight.data
        return h - self.mean - self.target(x)


class SameData(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.online.weight.data = self.online.weight.data.to(x.dtype)
        return self.online(x)


def step_of(model: Written, loss: Callable[..., torch.Tensor] = mse_loss) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
    return ig.TrainStep(model, loss, optimizer, {"x": torch.randn(8, 4), "y": torch.rand(8, 3)})


def test_writes_into_a_list_of_tensors_are_seen() -> None:
    assert written_state(capture(step_of(AverageOfLists())).train) == {"model.target.weight", "model.target.bias"}


@pytest.mark.parametrize("kind", [AverageInPlace, AverageByData, Swapped, AssignedData, SameData])
def test_a_forward_writes_into_tensors_that_no_optimizer_updates(kind: type[Written], compiled: Compile) -> None:
    torch.manual_seed(0)
    compiled(step_of(kind()), "train_step", "eval_step")  # compilation compares the results with eager


def test_a_loss_reads_and_writes_data(compiled: Compile) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = output.log_softmax(1)
        wanted = scores.data.clone()
        wanted.fill_(0.1)
        wanted[:, 0] = y.data[:, 0]
        return kl_div(scores, wanted, reduction="batchmean")

    torch.manual_seed(0)
    compiled(step_of(SameData(), loss), "train_step")


class ClampedWeight(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.online.weight.data = self.online.weight.data.clamp(-0.1, 0.1)  # here
        return self.online(x)


class SharedData(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.target.weight.data = self.online.weight.data  # here
        return self.online(x) - self.target(x)


class ReshapedData(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = x.data  # here
        return self.online(x)


class OverwrittenAfterUse(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.online(x) * self.mean  # here
        self.mean.add_(1)
        return scaled


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ClampedWeight, "into the parameter weight, in place or through .data"),
        (SharedData, "makes two tensors share memory"),
        (ReshapedData, "another shape or dtype"),
        (OverwrittenAfterUse, "overwritten in place before the backward"),
    ],
)
def test_a_write_that_eager_would_see_elsewhere_is_refused(kind: type[Written], says: str) -> None:
    with pytest.raises(CaptureError) as caught:
        differentiate(capture(step_of(kind())))
    lines, start = inspect.getsourcelines(kind)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:{line}:")
