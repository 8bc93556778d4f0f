"""Padding is set to zero once for all readers of a value, where the value is computed, unless it is zero already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from irongrad.padding import Call, Padded
from irongrad.padding.registry import _USER

aten = torch.ops.aten

GraphOf = Callable[..., GraphModule]


def _masked(graph: GraphModule) -> list[Node]:
    """The values that the masks of `graph` are applied to."""
    return [n.args[1] for n in graph.graph.nodes if n.target is aten.where.self]


def _two_layers(x: Tensor) -> Tensor:
    hidden = (x @ torch.linspace(-1, 1, 36, dtype=x.dtype).reshape(6, 6)).square()
    return hidden.flatten(0, 1).mT @ (hidden + 1).flatten(0, 1)


def test_padding_is_zeroed_once_for_all_readers_of_a_value(joint_graph: GraphOf):
    masked = _masked(joint_graph(_two_layers, "BTC"))
    assert masked
    for value in masked:
        assert len(value.users) == 1, f"{value} is read with zeros and without: {list(value.users)}"
    assert len(set(masked)) == len(masked)


def test_arguments_are_not_masked(joint_graph: GraphOf):
    def looked_up(x: Tensor, index: Tensor) -> Tensor:
        table = torch.linspace(-1, 1, 10, dtype=x.dtype).reshape(5, 2)
        return x.sum() + torch.nn.functional.embedding(index, table).sum(2)

    assert not [v for v in _masked(joint_graph(looked_up, "BT", ("BT", 5))) if v.op == "placeholder"]


def _squares(x: Tensor) -> Tensor:
    return x * x.expand(4, -1, -1, -1)[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x.exp().sum((0, 1)), x.exp().amax(0)), id="zeros beside another filler"),
        pytest.param(lambda x: x.exp().permute(2, 0, 1).flatten(1) @ x.exp().flatten(0, 1), id="through views"),
        pytest.param(lambda x: (x[:, :1].expand(-1, x.shape[1], -1).exp() * x).sum(1), id="of equal elements"),
        pytest.param(lambda x: torch.ones_like(x).flatten(0, 1).mT @ x.flatten(0, 1), id="of a constant"),
        pytest.param(lambda x: x.cos().mT @ x.cos().split(3, 2)[1], id="of one of several results"),
        pytest.param(_two_layers, id="of two layers"),
        pytest.param(_squares, id="of an expanded value"),
    ],
)
def test_other_readers_of_a_zeroed_value_get_right_results(
    function: Callable[[Tensor], Any], holds: Callable[..., None]
):
    holds(function, "BTC")


@pytest.mark.parametrize(
    "lie",
    [lambda call, x: Padded(call.run() + 1, x.layout, zero=True), lambda call, x: x.view(call.run() + 1, x.layout)],
)
def test_a_rule_that_misstates_its_padding_is_detected(
    lie: Callable[[Call, Padded], Padded], holds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(_USER, aten.sinh.default, lambda call: lie(call, call["self"]))
    with pytest.raises(AssertionError):
        holds(lambda x: torch.sinh(x).sum((0, 1)) + x.sum(), "BTC")
