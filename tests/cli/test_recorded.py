"""A recorded graph equals the graph that `make_fx` traces; a function that cannot be recorded is traced by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

import irongrad as ig
from irongrad.graph.nodes import kind_of
from irongrad.operators.legalize import retrace as module
from irongrad.operators.legalize.retrace import interpret, retrace
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer


def never(*arguments: Any) -> GraphModule:
    raise NotImplementedError


def spelled(graph: GraphModule) -> list[tuple[Any, ...]]:
    """Each node except aliases: its operator, arguments, shape and dtype, the user's line, whether it is backward."""
    numbers: dict[Node, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.alias.default:
            numbers[node] = numbers[node.args[0]]
            continue
        numbers[node] = len(rows)
        arguments = map_aggregate((node.args, node.kwargs), lambda a: numbers[a] if isinstance(a, Node) else repr(a))
        about = node.meta.get("stack_trace"), node.meta.get("autograd_backward", False)
        rows.append((node.op, str(node.target), arguments, kind_of(node.meta.get("val")), *about))
    return [row[1:] if row[0] == "call_function" else (row[0], *row[2:]) for row in rows]


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool2d(torch.relu(self.norm(self.convolution(x))), 2)
        return self.out(nn.functional.dropout(hidden.mean((2, 3)), 0.5, self.training))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.attention, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.words(x))
        return self.out(self.attention(hidden)[:, -1])


IMAGE, WORDS = (Image, torch.rand(2, 3, 8, 8)), (Words, torch.arange(12).reshape(2, 6) % 9)


@pytest.mark.parametrize(
    ("model", "x", "precision"),
    [
        pytest.param(*IMAGE, "f32", id="image-f32", marks=pytest.mark.slow),
        pytest.param(*IMAGE, "bf16", id="image-bf16"),
        pytest.param(*WORDS, "f32", id="words-f32"),
        pytest.param(*WORDS, "bf16", id="words-bf16", marks=pytest.mark.slow),
    ],
)
def test_steps_are_recorded_as_make_fx_traces_them(
    model: Callable[[], nn.Module], x: torch.Tensor, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graphs() -> dict[str, list[tuple[Any, ...]]]:
        torch.manual_seed(0)
        made = model()
        optimizer, inputs = torch.optim.AdamW(made.parameters()), {"x": x, "y": torch.tensor([1, 4])}
        loss = nn.functional.cross_entropy
        step = ig.TrainStep(made, loss, optimizer, inputs, precision=precision, clip_grad_norm=1.0)
        functions = add_optimizer(differentiate(capture(step))).functions
        return {name: spelled(function.graph) for name, function in functions.items()}

    monkeypatch.setattr(module, "_traced_by_make_fx", never)
    recorded = graphs()
    monkeypatch.undo()
    monkeypatch.setattr(module, "record", never)
    traced = graphs()
    assert recorded.keys() == traced.keys()
    for name in traced:
        assert recorded[name] == traced[name], name


def with_a_constant(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return [x + torch.ones(3)[0].new_tensor([1.0, 2.0])]


def with_branches(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))


@pytest.mark.parametrize("function", [with_a_constant, with_branches])
def test_functions_that_cannot_be_recorded_are_traced(
    function: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> None:
    x = torch.tensor([0.5, 0.25])
    torch.testing.assert_close(list(interpret(retrace(function, [x]), [x])), list(function(x)))
