"""Lookups of rows, and the packing of operands that a loop does not change, stay before the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

import irongrad as ig
from irongrad.mlir.walk import around, block_of, found_in, loops_around, parsed
from irongrad.passes.module.hoist_lookups import HoistLookups
from irongrad.passes.module.pack_before_loops import PackBeforeLoops

SIZE, STEPS = 32, 20
PLACES = torch.arange(STEPS * SIZE).reshape(STEPS, SIZE) % 7
TABLE, WEIGHT, STATE = torch.randn(7, SIZE), torch.randn(SIZE, SIZE) / SIZE, torch.zeros(SIZE, SIZE)
BIAS = torch.randn(SIZE)

Tensors = tuple[torch.Tensor, ...]


def looked_up(places: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor):
    return scan(_step(weight), state, F.embedding(places, table) + bias)


def turned_round(
    places: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor
):
    return scan(_step(weight), state, table.flip(0)[:, None].expand(7, SIZE, SIZE) * bias)


def twice(places: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor):
    """A loop in a loop; both multiply by matrices from outside of both."""

    def step(state: torch.Tensor, row: torch.Tensor) -> Tensors:
        inner, _ = scan(_step(weight), state, row[:3, None] * bias)
        return inner, inner.sum(0)

    return scan(step, state, F.embedding(places, table))


def _step(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], Tensors]:
    def step(state: torch.Tensor, row: torch.Tensor) -> Tensors:
        new = (state @ weight + row).tanh()
        return new, new.sum(0)

    return step


GIVEN = (PLACES, TABLE, WEIGHT, STATE, BIAS)


def in_loops(flow: bytes, name: str, element: str = "") -> int:
    """The number of operations in loops that read a value with such elements from outside of the loop."""
    with parsed(flow) as module:
        found = found_in(module, name)
        return sum(any(_is_from_around(v, op) and element in str(v.type) for v in op.operands) for op in found)


def _is_from_around(value: Any, operation: Any) -> bool:
    return any(loop not in around(block_of(value)) for loop in loops_around(operation.block))


def test_rows_are_looked_up_before_the_loop_and_iree_still_would_not(flow_of):
    """When the last assertion fails, IREE leaves lookups where they are, and the pass can go."""
    flow = flow_of(looked_up, GIVEN, HoistLookups().run)
    assert in_loops(flow, "flow.tensor.slice", "xi64") == 0
    assert b"optimization_barrier" not in flow
    assert in_loops(flow_of(looked_up, GIVEN), "flow.tensor.slice", "xi64") > 0


def test_rows_that_are_no_lookups_stay_in_the_loop(flow_of):
    """Before the loop they would take memory."""
    edited, plain = (flow_of(turned_round, GIVEN, *edit) for edit in ([HoistLookups().run], []))
    assert edited == plain


@pytest.mark.parametrize("function", [looked_up, twice])
def test_operands_are_packed_before_loops_and_iree_still_would_not(function, flow_of, without):
    """When the second assertion fails, IREE packs before loops itself, and `pack-before-loops` can go."""
    assert in_loops(flow_of(function, GIVEN, HoistLookups().run), "flow.tensor.encode") == 0
    without(PackBeforeLoops)
    assert in_loops(flow_of(function, GIVEN, HoistLookups().run), "flow.tensor.encode") > 0


@pytest.mark.parametrize("function", [looked_up, turned_round, twice])
def test_results_are_right(function):
    """Compilation verifies the results."""
    ig.compile_function(function, GIVEN)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_layers_over_a_lookup_train_in_the_memory_that_is_predicted(cell, tmp_path):
    """Compilation verifies the steps.

    The model keeps what a loop gives to the end. A kernel of a loop (`loop-kernels`) frees it after its last reader.
    """

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(7, 32), cell(32, 32, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(self.embedding(x))[0]

    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": PLACES, "y": torch.randn(STEPS, SIZE, 32)}
    step = ig.TrainStep(model, F.mse_loss, optimizer, inputs)
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert artifact.manifest.memory is not None
    allocated = artifact.manifest.targets[0].transients["train_step"]
    assert 0.9 * allocated < artifact.manifest.memory.predicted["train_step"] < 1.6 * allocated
