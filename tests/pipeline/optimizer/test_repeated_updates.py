"""The update is traced once for all parameters that are updated alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.optimizer.repeated_updates import first_alike
from irongrad.pipeline.optimizer.state import initial_state


class Foreign(torch.optim.SGD):
    """A subclass, which may update parameters in any way."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def grouped(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, str]:
    parameters = dict(model.named_parameters())
    return first_alike([optimizer], parameters, initial_state([optimizer], parameters))


def test_equal_shapes_of_a_group_are_alike() -> None:
    model = network()
    groups = [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": model[2].parameters(), "lr": 1.0},
    ]
    found = grouped(torch.optim.Adam(groups), model)
    assert found == {
        "0.weight": "0.weight",
        "0.bias": "0.bias",
        "1.weight": "0.weight",
        "1.bias": "0.bias",
        "2.weight": "2.weight",
        "2.bias": "2.bias",
    }


def test_parameters_with_other_step_counts_are_not_alike() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for number, layer in enumerate(model):
        for _ in range(2 if number else 1):
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    found = grouped(optimizer, model)
    assert found["1.weight"] == "1.weight"
    assert found["2.weight"] == "1.weight"


def test_the_update_of_a_subclass_is_traced_for_every_parameter() -> None:
    model = network()
    found = grouped(Foreign(model.parameters(), lr=0.1), model)
    assert all(name == first for name, first in found.items())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), {}),
        (lambda p: torch.optim.AdamW(p, lr=0.1), {"clip_grad_norm": 0.5}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), {"clip_grad_value": 0.01}),
        (lambda p: torch.optim.NAdam(p, lr=0.1), {"loss_scale": 128.0}),
    ],
)
def test_the_copies_update_as_eager_does(make, options) -> None:
    model = network()
    optimizer = make(model.parameters())
    x, t = torch.randn(5, 4), torch.randn(5, 4)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, {"x": x, "t": t}, **options)
    graph = step_graph(step)
    update = graph.functions["update"]
    scale = options.get("loss_scale", 1.0)
    nn.functional.mse_loss(model(x), t).backward()
    gradients = {n: p.grad * scale for n, p in model.named_parameters()}
    outputs = interpret(update.graph, [_given(a, graph, gradients) for a in update.arguments])
    new = dict(zip(update.results, outputs, strict=True))
    if norm := options.get("clip_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    if limit := options.get("clip_grad_value"):
        nn.utils.clip_grad_value_(model.parameters(), limit)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(new[Value("state", name)], parameter.detach())
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                torch.testing.assert_close(new[Value("state", f"optimizer/{key}/{name}")], value)


def _given(value: Value, graph, gradients) -> torch.Tensor:
    if value.kind == "gradient":
        return gradients[value.name]
    if value.kind == "hyper":
        return torch.tensor(graph.hypers[value.name], dtype=torch.float64)
    return graph.tensor(value.name).initial
