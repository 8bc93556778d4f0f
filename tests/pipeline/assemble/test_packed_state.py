"""Tensors that the update concatenates are stored as one pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import StepGraph, Value
from irongrad.passes import parse_passes, run_passes
from irongrad.pipeline.assemble.packed_state import pack_state
from irongrad.pipeline.driver import build, step_graph
from irongrad.pipeline.options import make_options

PASSES = parse_passes("dce,fold,simplify,cse,dce,multi-tensor")


def make_step(clip: float | None = None) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = {"x": torch.randn(4, 5), "y": torch.randn(4, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, clip_grad_norm=clip)


@pytest.fixture(scope="module")
def plain() -> StepGraph:
    return step_graph(make_step())


@pytest.fixture(scope="module")
def graph(plain: StepGraph) -> StepGraph:
    """The graph whose update concatenates tensors."""
    return run_passes(plain, PASSES)


def test_packs_hold_the_tensors_that_the_update_concatenates(graph: StepGraph):
    packed = pack_state(graph)
    assert {(next(iter(p.starts)).kind, len(p.starts)) for p in packed.packs} == {("state", 6), ("gradient", 6)}
    update = packed.functions["update"]
    assert sum(a.kind == "pack" for a in update.arguments) == 3
    assert sum(r.kind == "pack" for r in update.results) == 2
    left = {v for v in update.arguments if v.kind in ("state", "gradient")}
    assert not left & {v for p in packed.packs for v in p.starts}
    assert packed.functions["joint"] is graph.functions["joint"]


def test_gradients_lie_in_the_pack_in_the_order_of_the_backward(graph: StepGraph):
    (pack,) = (p for p in pack_state(graph).packs if Value("gradient", "0.weight") in p.starts)
    assert list(pack.starts)[-1].name.startswith("0.")
    assert next(iter(pack.starts)).name.startswith("4.")


def test_gradients_whose_norm_is_taken_are_packed_too():
    """The norm reads them from the pack."""
    packed = pack_state(run_passes(step_graph(make_step(clip=1.0)), PASSES))
    assert {(next(iter(p.starts)).kind, len(p.starts)) for p in packed.packs} == {("state", 6), ("gradient", 6)}


def test_without_the_pass_nothing_is_packed(plain: StepGraph):
    assert pack_state(plain).packs == ()
    assert pack_state(replace(plain, functions={"joint": plain.functions["joint"]})).packs == ()


def test_a_packed_step_trains_and_keeps_its_state(tmp_path: Path):
    """Compilation verifies the results of every entry point; this test checks the state between calls."""
    step = make_step()
    options = make_options(tmp_path / "packed", entry_points=("train_step", "predict", "reset"))
    made = build(step, options)
    assert made.artifact is not None
    session = made.artifact.load()
    first = session.state()
    x, y = (t.numpy() for t in step.inputs.values())
    losses = [session.train_step(x=x, y=y) for _ in range(3)]
    assert losses[2] < losses[0]
    trained = session.state()
    assert any((trained[n] != first[n]).any() for n in first)
    session.reset()
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, first[name])
    session.load_state(trained)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, trained[name])
