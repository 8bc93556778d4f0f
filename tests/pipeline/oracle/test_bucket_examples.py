"""Every bucket is verified, with an example of sizes that run in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.pipeline.oracle.bucket_examples import at_other_sizes


def step_with(buckets: list[int]) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(4, 4), "y": torch.randint(0, 3, (4,))},
        dynamic={"x": {0: "B"}, "y": {0: "B"}},
        buckets={"B": buckets},
    )


@pytest.mark.parametrize(("buckets", "sizes"), [([2, 4], [1]), ([1, 2, 4], [1, 2]), ([4, 8, 16], [7, 15])])
def test_other_buckets_have_examples(buckets: list[int], sizes: list[int]) -> None:
    captured = capture(step_with(buckets))
    others = at_other_sizes(captured, add_optimizer(differentiate(captured)))
    assert [o.step.inputs["x"].shape[0] for o in others] == sizes


def test_open_dimensions_have_several_sizes_in_every_bucket() -> None:
    """The example runs in the bucket of 8; there are a row, and more rows than the example has, in both buckets."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = ig.TrainStep(
        model=model,
        loss=lambda made, y: nn.functional.cross_entropy(made.flatten(0, 1), y.flatten()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(3, 7, 4), "y": torch.randint(0, 3, (3, 7))},
        dynamic={"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "T"}},
        buckets={"T": [4, 8]},
    )
    captured = capture(step)
    others = at_other_sizes(captured, add_optimizer(differentiate(captured)))
    assert [tuple(o.step.inputs["y"].shape) for o in others] == [(3, 3), (1, 3), (7, 3), (1, 7), (7, 7)]


def test_sizes_over_a_tile_are_verified_where_a_step_is_short() -> None:
    """One row of 131 has four times as many elements as five of 15 at most, and so have 131 rows of one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    sizes = {0: "B", 1: "T"}
    inputs = {"x": torch.randn(2, 7, 4), "y": torch.randn(2, 7, 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, dynamic={"x": sizes, "y": sizes})
    captured = capture(step)
    others = at_other_sizes(captured, add_optimizer(differentiate(captured)))
    assert [tuple(o.step.inputs["y"].shape[:2]) for o in others] == [(1, 1), (5, 15), (131, 1), (1, 131)]


def test_a_bucket_of_one_trains(tmp_path: Path) -> None:
    step = step_with([1, 4])
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    loss = step.loss(step.model(step.inputs["x"][:1]), step.inputs["y"][:1])
    inputs = {name: tensor[:1].numpy() for name, tensor in step.inputs.items()}
    assert artifact.load().train_step(**inputs) == pytest.approx(loss.item(), rel=1e-5)
