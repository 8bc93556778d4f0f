"""BatchNorm's statistics over ranks: which layers exchange, what is refused. tests/runtime/ranks has the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.over_ranks import exchanges_in, kinds_of
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.sync_batch_norm import Synchronised
from irongrad.pipeline.front import front, plainly
from irongrad.runtime.errors import UserError


def make_step(*layers: nn.Module, **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 5))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(4, 3, 5), "y": torch.randn(4, 2)},
        **options,
    )


def exchanges(step: ig.TrainStep, synchronised: Synchronised) -> list[tuple[str, int]]:
    graph = front(capture(step, (), synchronised), plainly)
    return kinds_of(exchanges_in(graph.functions["joint"].graph.graph))


def test_layers_and_all_that_train() -> None:
    moments, gradient = ("moments", 7), ("gradient", 6)

    def layers() -> list[nn.Module]:
        return [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3)]

    assert exchanges(make_step(*layers()), Synchronised.NONE) == []
    assert exchanges(make_step(*layers()), Synchronised.LAYERS) == [moments, gradient]
    # Nothing needs the gradient of what the first layer normalises.
    assert exchanges(make_step(*layers()), Synchronised.ALL) == [moments, moments, gradient]


def test_the_mean_over_all_steps_is_exchanged_too(tmp_path: Path) -> None:
    step = make_step(nn.BatchNorm1d(3, momentum=None, affine=False))
    assert exchanges(step, Synchronised.ALL) == [("moments", 7)]
    ig.compile(step, tmp_path / "a", communicate=True, sync_batch_norm=True, entry_points=["train_step"])


def test_it_needs_ranks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add communicate"):
        ig.compile(make_step(nn.BatchNorm1d(3)), tmp_path / "a", sync_batch_norm=True)


@pytest.mark.parametrize(
    ("choice", "message"),
    [({"route": "stablehlo"}, "route stablehlo"), ({"max_memory": "90%"}, "leave out max_memory")],
)
def test_choices_that_do_not_go_together(choice: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        ig.compile(make_step(nn.SyncBatchNorm(3)), tmp_path / "a", communicate=True, **choice)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.norm(x), lambda x: x.clone(), (x,))


def test_a_branch_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"test_statistics.py.*\n.*is in a branch or a loop"):
        ig.compile(make_step(Branches()), tmp_path / "a", communicate=True, sync_batch_norm=True)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        y = self.norm(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient.square().mean()


def test_a_second_derivative_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="second derivative of a BatchNorm"):
        ig.compile(make_step(Penalised()), tmp_path / "a", communicate=True, sync_batch_norm=True)
