"""Reads and writes with several index tensors of unknown sizes: one graph serves every size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.graph.step_graph import Function, Value
from irongrad.operators.legalize.retrace import interpret_eager
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.lower.reshapes import joined_and_split
from irongrad.sizes.symbols import has_symbols

aten = torch.ops.aten


class _Places(nn.Module):
    """Reads elements of `x` at computed positions, with the dimensions in every order, and writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor, last: Tensor, places: Tensor) -> list[Tensor]:
        h = x * self.scale
        rows = torch.arange(x.shape[0])
        heads = h.unflatten(2, (2, 3))
        return [
            h[rows, last],
            h[rows, last - x.shape[1]],
            h[rows[:, None], places],
            h.transpose(0, 1)[last, rows, 2],
            heads[rows, :, last % 2],
            heads[:, places[0], last[:1] % 2],
            torch.zeros_like(h).index_put((rows[:, None], places), h[:, :3], accumulate=True),
            torch.zeros_like(h).index_put((rows, last), h[:, 0]),
        ]


def _loss(made: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(made):
        for d in range(part.ndim):
            waves = torch.cos(torch.arange(part.shape[d], dtype=torch.float64) * (0.7 + number + d))
            part = part * waves.reshape([-1 if i == d else 1 for i in range(part.ndim)])
        total = total + part.sum()
    return total


def _batch(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    x = torch.randn(b, t, 6, generator=generator, dtype=torch.float64)
    last, places = (torch.randint(0, t, size, generator=generator) for size in ((b,), (b, 3)))
    return {"x": x, "last": last, "places": places}


@pytest.fixture(scope="module")
def joint() -> tuple[nn.Module, Function]:
    model = _Places()
    names = {"x": {0: "B", 1: "T"}, "last": {0: "B"}, "places": {0: "B"}}
    step = ig.TrainStep(model, _loss, torch.optim.SGD(model.parameters()), _batch(4, 5), dynamic=names)
    return model, differentiate(capture(step)).joint


@pytest.mark.parametrize(("b", "t"), [(4, 5), (1, 3), (2, 3), (3, 17), (7, 4)])
def test_one_graph_reads_and_writes_at_every_size(joint: tuple[nn.Module, Function], b: int, t: int):
    model, function = copy.deepcopy(joint[0]), joint[1]
    batch = _batch(b, t)
    loss = _loss(model(**batch))
    loss.backward()
    state = dict(model.named_parameters())
    given = [batch[a.name] if a.kind == "input" else state[a.name].detach() for a in function.arguments]
    for graph in (function.graph, joined_and_split(function.graph)):
        made = dict(zip(function.results, interpret_eager(graph, given), strict=True))
        torch.testing.assert_close(made[Value("output", "loss")], loss.detach())
        torch.testing.assert_close(made[Value("gradient", "scale")], model.scale.grad)


def test_an_operator_takes_one_index_tensor_of_unknown_size(joint: tuple[nn.Module, Function]):
    """torch-mlir lowers several index tensors only if their sizes are known."""
    found = [n.args[1] for n in joint[1].graph.graph.nodes if n.target in (aten.index.Tensor, aten.index_put.default)]
    given = [[i for i in indices if i is not None] for indices in found]
    assert max(map(len, given)) == 2
    assert all(len(g) == 1 for g in given if any(has_symbols(i.meta["val"]) for i in g))
