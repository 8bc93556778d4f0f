"""An update in shards computes what the whole update does; updates that cannot be divided are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import StepGraph, Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.optimizer.sharded_update import shard_update, sharded
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Role


def graph_of(optimizer: Any, layers: int = 2, **options: Any) -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)), nn.Linear(6, 3))
    step = ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer(model.parameters()),
        inputs={"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))},
        **options,
    )
    return replace(step_graph(step), bucket_bytes=1 << 20)


def run(graph: StepGraph, names: list[str], values: dict[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """The results of several functions on `values`; a later one also reads the numbers of an earlier one."""
    found: dict[Value, torch.Tensor] = {}
    for name in names:
        function = graph.functions[name]
        known = values | {v: t for v, t in found.items() if v.kind == "shared"}
        outputs = interpret(function.graph, [known[a] for a in function.arguments])
        found |= dict(zip(function.results, outputs, strict=True))
    return {v: t for v, t in found.items() if v.kind != "shared"}


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2), {"clip_grad_norm": 0.1}),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}),
    "adafactor": (lambda p: torch.optim.Adafactor(p), {}),
    "scaled": (lambda p: torch.optim.NAdam(p), {"loss_scale": torch.amp.GradScaler("cpu"), "precision": "f16"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_shards_compute_what_the_whole_update_does(name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    whole = graph_of(optimizer, **options)
    parts = shard_update(whole)
    update = whole.functions["update"]
    torch.manual_seed(1)
    values = {
        a: torch.randn(update.example(i).shape).abs().to(update.example(i).dtype)
        for i, a in enumerate(update.arguments)
    }
    chain = list(chain_of("apply_step", parts))[1:]
    assert chain == ["update", *(s.function for s in parts.shards)]
    expected, found = run(whole, ["update"], values), run(parts, chain, values)
    assert found.keys() == expected.keys()
    for value, tensor in expected.items():
        assert torch.equal(found[value], tensor), value


def test_each_shard_has_the_state_of_whole_parameters() -> None:
    graph = shard_update(graph_of(OPTIMIZERS["adamw"][0], clip_grad_norm=0.1))
    state = [name for shard in graph.shards for name in shard.state]
    assert len(state) == len(set(state))
    assert set(state) == {t.name for t in graph.state if t.role is Role.OPTIMIZER and t.initial.numel() > 1}
    for shard in graph.shards:
        owners = {name.split("/", 2)[2] for name in shard.state}
        function = graph.functions[shard.function]
        assert owners == {v.name for v in function.results} - set(shard.state)
        assert all(function.example(i).numel() == 1 for i, a in enumerate(function.arguments) if a.kind == "shared")


def test_small_parameters_share_a_shard() -> None:
    graph = shard_update(graph_of(OPTIMIZERS["momentum"][0], layers=60))
    assert 16 <= len(graph.shards) <= 70
    assert any(len(shard.state) > 2 for shard in graph.shards)
    alone = shard_update(replace(graph_of(OPTIMIZERS["momentum"][0], layers=60), bucket_bytes=1))
    assert all(len(shard.state) == 1 for shard in alone.shards)


class Coupled(torch.optim.Optimizer):
    """Each parameter moves by the mean of all momenta."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad)
        mean = sum(self.state[p]["momentum"].mean() for p in parameters)
        for p in parameters:
            p.sub_(mean, alpha=0.1)


def test_an_update_that_mixes_parameters_is_refused() -> None:
    with pytest.raises(UserError, match=r"updates '.*' and '.*' together, from state of both.*compile without shard"):
        shard_update(graph_of(Coupled))


def test_an_optimizer_without_state_is_refused() -> None:
    with pytest.raises(UserError, match="there is nothing to divide among ranks: compile without shard"):
        shard_update(graph_of(lambda p: torch.optim.SGD(p, lr=0.1)))


def test_several_steps_are_refused() -> None:
    graph = graph_of(OPTIMIZERS["adamw"][0])
    with pytest.raises(UserError, match="shard takes a single step, and there are one, two"):
        sharded({"one": graph, "two": graph})
