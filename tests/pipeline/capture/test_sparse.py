"""Sparse tensors are refused by name, before anything is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.runtime.errors import UnsupportedOpError

EDGES = torch.eye(8).to_sparse()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
        return torch.sparse.mm(self.held if edges is None else edges, self.linear(x))


class OfGlobal(Graph):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return EDGES @ self.linear(x)


def step_of(model: nn.Module, **more: torch.Tensor) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, mse_loss, optimizer, {"x": torch.randn(8, 4), **more, "y": torch.randn(8, 3)})


def with_buffer() -> nn.Module:
    model = Graph()
    del model.held
    model.register_buffer("held", torch.eye(8).to_sparse(), persistent=False)
    return model


def with_attribute() -> nn.Module:
    model = Graph()
    model.held = torch.eye(8).to_sparse()
    return model


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda: step_of(Graph(), edges=torch.eye(8).to_sparse()), "the input edges is a sparse tensor"),
        (lambda: step_of(with_buffer()), "self.held is a sparse tensor"),
        (lambda: step_of(with_attribute()), "a constant that the model or the loss names is a sparse tensor"),
        (lambda: step_of(OfGlobal()), "a constant that the model or the loss names is a sparse tensor"),
        (lambda: step_of(nn.Sequential(nn.Linear(4, 3), nn.Embedding(3, 3, sparse=True))), r"model.1 \(Embedding\)"),
    ],
)
def test_a_sparse_tensor_is_refused_by_name(step: object, says: str) -> None:
    with pytest.raises(UnsupportedOpError, match=says):
        capture(step())  # type: ignore[operator]
