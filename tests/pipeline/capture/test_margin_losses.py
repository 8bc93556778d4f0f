"""Margin losses: their joint graphs have eager's loss and gradients, also where a score is exactly at the margin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate

LABELS = torch.tensor([0, 1, 1, 2, 3])
LISTS = torch.tensor([[0, 1, -1, 2], [3, -1, 0, 0], [-1, 0, 0, 0], [0, 1, 2, 3], [1, 0, -1, -1]])

# Whole numbers: many differ by one, which is the margin.
SCORES = torch.tensor([[1.0, 1, 2, 0], [1, 0, 2, 0], [0, 1, -2, 0], [1, 1, 2, 0], [-1, 1, -2, 0]])

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "of one class": lambda scores: functional.multi_margin_loss(scores, LABELS),
    "of one class, squared": lambda scores: functional.multi_margin_loss(scores, LABELS, p=2, reduction="sum"),
    "of several classes": lambda scores: functional.multilabel_margin_loss(scores, LISTS),
}


class Shifted(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5, 4))
        self._loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self._loss(x + self.shift)


@pytest.mark.parametrize("name", LOSSES)
def test_the_joint_graph_has_eagers_loss_and_gradients_at_the_margin(name: str) -> None:
    model = Shifted(LOSSES[name])
    step = ig.TrainStep(model, None, torch.optim.SGD(model.parameters()), {"x": SCORES})
    joint = differentiate(capture(step))
    values = {s.name: s.initial for s in joint.state} | dict(step.inputs)
    results = joint.joint.graph(*(values[a.name] for a in joint.joint.arguments))
    found = {r.kind: t for r, t in zip(joint.joint.results, results, strict=True)}
    loss = model(SCORES)
    loss.backward()
    torch.testing.assert_close(found["output"].reshape(()), loss.detach())
    torch.testing.assert_close(found["gradient"], model.shift.grad)
