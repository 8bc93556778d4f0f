"""The segments of a function, run one after the other, give what the whole function gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.place.chains import chained
from irongrad.pipeline.place.owners import Ownership
from irongrad.pipeline.place.parts import parts_of
from irongrad.pipeline.place.segments import STORED, Segment, segments_of

ENTRIES = ("train_step", "grad_step", "apply_step", "eval_step", "predict")


class Tied(nn.Module):
    """A table that two parts read, dropout, a module that no part names, and a residual around one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.table(i))
        return self.head(h + self.body(h))


class Norms(nn.Module):
    """Buffers that the forward changes, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale * self.second(self.first(x)))


def tied() -> StepGraph:
    torch.manual_seed(0)
    model = Tied()
    indices = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    return step_graph(
        ig.TrainStep(
            model,
            lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dict(zip("iy", indices, strict=True)),
            clip_grad_norm=0.1,
        )
    )


def norms() -> StepGraph:
    torch.manual_seed(0)
    model = Norms()
    return step_graph(
        ig.TrainStep(
            model,
            lambda out, y: (F.cross_entropy(out, y), {"right": (out.argmax(1) == y).float().mean()}),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            {"x": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))},
            loss_scale=torch.amp.GradScaler("cpu", init_scale=8.0),
            after_step=torch.optim.swa_utils.AveragedModel(model),
        )
    )


STEPS = {
    "tied": (tied, {"table": "llvm-cpu", "body": "llvm-cpu", "head": "llvm-cpu"}),
    "norms": (norms, {"first+last": "llvm-cpu", "second": "llvm-cpu"}),
}


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> tuple[StepGraph, Ownership, dict[str, tuple[int, ...]]]:
    make, place = STEPS[request.param]
    graph, parts = make(), parts_of(place)
    ownership = Ownership(parts, graph)
    for entry in ENTRIES:
        ownership.of(chained(chain_of(entry, graph), graph))
    numbers = {t.name: ownership.holder(t) for t in graph.state}
    holders = {name: tuple(range(len(parts))) if number is None else (number,) for name, number in numbers.items()}
    return graph, ownership, holders


def example(value: Value, like: torch.Tensor, graph: StepGraph) -> torch.Tensor:
    if value.kind == "state":
        return graph.tensor(value.name).initial
    if value.kind == "input":
        return graph.inputs[value.name]
    if value.kind == "hyper":
        return torch.tensor(graph.hypers[value.name], dtype=torch.float64)
    return torch.full(like.shape, 2.0, dtype=like.dtype)  # accumulated gradients, and how many


def run(function: Function, known: dict[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    with torch.no_grad():
        return dict(
            zip(function.results, interpret(function.graph, [known[a] for a in function.arguments]), strict=True)
        )


def run_segments(
    segments: Sequence[Segment], given: dict[Value, torch.Tensor], holders: dict[str, tuple[int, ...]]
) -> tuple[dict[Value, torch.Tensor], list[dict[Value, torch.Tensor]]]:
    """Run the segments, each on the state of its part; return what they give and what each part holds then."""
    count = 1 + max(number for numbers in holders.values() for number in numbers)
    held = [{v: t for v, t in given.items() if v.kind in STORED and n in holders[v.name]} for n in range(count)]
    outside = {v: t for v, t in given.items() if v.kind not in STORED}
    for segment in segments:
        results = run(segment.function, {**outside, **held[segment.part]})
        held[segment.part] |= {v: t for v, t in results.items() if v.kind in STORED}
        outside |= {v: t for v, t in results.items() if v.kind not in STORED}
    return outside, held


@pytest.mark.parametrize("entry", ENTRIES)
def test_segments_give_what_the_whole_function_gives(step, entry: str):
    graph, ownership, holders = step
    whole = chained(chain_of(entry, graph), graph)
    given = {a: example(a, whole.example(i), graph) for i, a in enumerate(whole.arguments)}
    expected = run(whole, given)
    segments = segments_of(whole, ownership.of(whole), holders)
    outside, held = run_segments(segments, given, holders)
    assert len({s.part for s in segments}) > 1
    for value, tensor in expected.items():
        found = [held[n][value] for n in holders[value.name]] if value.kind in STORED else [outside[value]]
        assert all(torch.equal(one, tensor) for one in found), value


def test_a_chain_of_modules_runs_forward_once_and_backward_once(plain: Callable[[], list[Segment]]):
    segments = plain()
    assert [s.part for s in segments] == [0, 1, 0]
    first, second, third = (s.function for s in segments)
    assert {v for v in second.arguments if v.kind == "passed"} < {*first.results}
    assert [v for v in second.results if v.kind == "passed"] == [
        v for v in third.arguments if v.kind == "passed" and v not in first.results
    ]
    state = {v.name for s in (first, second, third) for v in s.results if v.kind == "state"}
    assert {"0.weight", "2.weight"} <= state


class Block(nn.Module):
    """A branch with a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def test_residuals_and_their_gradients_are_added_where_their_branches_end():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    inputs = {"input": torch.randn(5, 6), "y": torch.randint(0, 6, (5,))}
    graph = step_graph(ig.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs))
    ownership = Ownership(parts_of({"0+1": "llvm-cpu", "2+3": "llvm-cpu"}), graph)
    whole = chained(("joint", "update"), graph)
    owners = ownership.of(whole)
    numbers = {t.name: ownership.holder(t) for t in graph.state}
    holders = {name: (0, 1) if number is None else (number,) for name, number in numbers.items()}
    segments = segments_of(whole, owners, holders)
    assert [s.part for s in segments] == [0, 1, 0]
    crossing = [v for v in segments[1].function.arguments if v.kind == "passed"]
    assert len(crossing) == 1  # the hidden state


@pytest.fixture
def plain() -> Callable[[], list[Segment]]:
    def cut() -> list[Segment]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        inputs = {"input": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))}
        graph = step_graph(ig.TrainStep(model, F.cross_entropy, optimizer, inputs))
        ownership = Ownership(parts_of({"0": "llvm-cpu", "2": "llvm-cpu"}), graph)
        whole = chained(("joint", "update"), graph)
        owners = ownership.of(whole)
        numbers = {t.name: ownership.holder(t) for t in graph.state}
        holders = {name: (0, 1) if number is None else (number,) for name, number in numbers.items()}
        return segments_of(whole, owners, holders)

    return cut
