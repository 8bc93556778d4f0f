"""When the inputs of an update are freed: the model's prediction against IREE's allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import Value
from irongrad.memory_model.values_between_functions import handovers
from irongrad.pipeline.driver import step_graph

WIDTH = 128


def make_step(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=optimizer(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(32, WIDTH), "y": torch.randn(32, WIDTH)},
        **options,
    )


def test_an_update_waits_for_its_gradient_and_for_readers_of_the_state_it_replaces():
    found = {gradient: h.awaited for h in handovers(step_graph(make_step())) for gradient in h.gradients}
    weight = Value("gradient", "4.weight")
    waits = {value for value in found[weight] if value.kind in ("gradient", "state")}
    assert waits == {weight, Value("state", "4.weight")}


def test_clipped_gradients_wait_for_all_gradients():
    graph = step_graph(make_step(clip_grad_norm=1.0))
    gradients = {Value("gradient", name) for name in graph.gradients}
    for handover in handovers(graph):
        assert gradients <= handover.awaited


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"clip_grad_norm": 1.0}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"clip_grad_norm": 1.0}),
    ],
)
def test_predicted_memory_is_close_to_what_iree_allocates(tmp_path, optimizer, options):
    ig.compile(make_step(optimizer, **options), tmp_path / "step", entry_points=("train_step",), cache=False)
    session = ig.runtime.load(tmp_path / "step")
    assert session.manifest.memory is not None
    predicted = session.manifest.memory.predicted["train_step"]
    assert predicted == pytest.approx(session.target.transients["train_step"], rel=0.05)
