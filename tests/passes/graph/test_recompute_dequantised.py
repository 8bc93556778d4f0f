"""The pass recompute-dequantised: the backward keeps quantised weights, and not the wide weights made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

import irongrad as ig
from irongrad.graph.float64_runs import differences, run_in_float64
from irongrad.graph.step_graph import StepGraph
from irongrad.memory_model.kernel_roles import bytes_of, sources
from irongrad.passes import parse_passes, run_passes
from irongrad.passes.recompute import is_backward, is_forward, is_recomputed
from irongrad.pipeline.driver import step_graph
from irongrad.sizes.symbols import has_symbols

SIZE = 128


class ByHand(nn.Module):
    """Linear layers whose weights the user packs and unpacks, with trained biases."""

    def __init__(self, values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.values = values
        for i in range(3):
            self.register_buffer(f"packed{i}", torch.randint(-8, 8, (SIZE, SIZE)).to(dtype))
            self.register_buffer(f"scale{i}", torch.rand(SIZE, 1) / SIZE)
        self.bias = nn.Parameter(torch.zeros(3, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            weight = self.values(getattr(self, f"packed{i}"), getattr(self, f"scale{i}"))
            x = torch.tanh(F.linear(x, weight) + self.bias[i])
        return x


def graph_of(model: nn.Module) -> StepGraph:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return step_graph(
        ig.TrainStep(model, F.mse_loss, optimizer, {"x": torch.randn(4, SIZE), "y": torch.randn(4, SIZE)})
    )


def joint_after(step: StepGraph, passes: str) -> GraphModule:
    return run_passes(step, parse_passes(passes)).functions["joint"].graph


def wide_kept(graph: GraphModule) -> Iterator[Node]:
    """Forward values of the size of a float32 weight that the backward reads."""
    read = {s for n in graph.graph.nodes if is_backward(n) for a in n.all_input_nodes for s in sources(a)}
    return (n for n in read if is_forward(n) and bytes_of(n) >= 4 * SIZE * SIZE)


CASES = {
    "int8": lambda: ig.quantize(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), "int8"),
    "int4": lambda: ig.quantize(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), "int4"),
    "bf16": lambda: ig.quantize(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), "bf16"),
    "by hand": lambda: ByHand(lambda packed, scale: packed.float() * scale, torch.int8),
    "by hand, shifted": lambda: ByHand(lambda packed, scale: (packed - 3) * scale, torch.int16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_backward_keeps_no_wide_weight(case: str) -> None:
    step = graph_of(CASES[case]())
    before, after = (joint_after(step, f"simplify,cse{more},dce") for more in ("", ",recompute-dequantised"))
    assert list(wide_kept(before)) or case == "bf16"  # by the model, each kernel repeats a cast that it reads
    assert not list(wide_kept(after))
    assert sum(map(is_recomputed, after.graph.nodes))


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_stay(case: str) -> None:
    step = graph_of(CASES[case]())
    before, after = (joint_after(step, f"simplify,cse{more},dce") for more in ("", ",recompute-dequantised"))
    tensors = {t.name: t.initial for t in step.state} | dict(step.inputs)
    arguments = [tensors[value.name] for value in step.functions["joint"].arguments]
    assert set(differences(run_in_float64(before, arguments), run_in_float64(after, arguments))) == {0.0}


def test_a_second_run_changes_nothing() -> None:
    step = graph_of(CASES["int8"]())
    once, twice = (joint_after(step, ",".join(["recompute-dequantised"] * times)) for times in (1, 2))
    assert str(once.graph) == str(twice.graph)


def test_a_merge_of_equal_nodes_does_not_undo_it() -> None:
    graph = joint_after(graph_of(CASES["int4"]()), "simplify,cse,recompute-dequantised,cse,dce")
    assert not list(wide_kept(graph))


def test_weights_that_the_backward_does_not_read_are_left_alone() -> None:
    """The first layer's input needs no gradient."""
    graph = joint_after(graph_of(ig.quantize(nn.Sequential(nn.Linear(SIZE, SIZE)), "int8")), "recompute-dequantised")
    assert not any(map(is_recomputed, graph.graph.nodes))


def test_float_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    graph = joint_after(graph_of(model), "simplify,cse,recompute-dequantised,dce")
    assert not any(map(is_recomputed, graph.graph.nodes))


def test_a_budget_of_memory_still_holds() -> None:
    """`rematerialise` runs after the pass, and recomputes other values."""
    step = graph_of(nn.Sequential(*(layer for _ in range(6) for layer in (CASES["int8"](), nn.GELU()))))
    graph = joint_after(step, "simplify,cse,recompute-dequantised,rematerialise{max_memory=60%},dce")
    assert any(is_recomputed(n, "rematerialise") for n in graph.graph.nodes)
    assert not list(wide_kept(graph))


def test_a_graph_of_any_size() -> None:
    model = ig.quantize(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), "int4")
    inputs = {"x": torch.randn(4, SIZE), "y": torch.randn(4, SIZE)}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = ig.TrainStep(model, F.mse_loss, optimizer, inputs, dynamic={"x": {0: "B"}, "y": {0: "B"}})
    function = run_passes(step_graph(step), parse_passes("simplify,cse,recompute-dequantised,dce")).functions["joint"]
    assert function.of_any_size
    assert any(map(is_recomputed, function.graph.graph.nodes))
    static = [n for n in function.graph.graph.nodes if not has_symbols(n.meta.get("val"))]
    read = {s for n in static if is_backward(n) for a in n.all_input_nodes for s in sources(a)}
    assert not [n for n in read if is_forward(n) and n in static and bytes_of(n) >= 4 * SIZE * SIZE]
