"""The rows of a block, chosen by measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.graph.float64_runs import differences, run_in_float64
from irongrad.graph.step_graph import StepGraph
from irongrad.passes import parse_passes, passes_at, run_passes
from irongrad.passes.base import Candidate, Measured, Timer
from irongrad.passes.graph.row_blocks import RowBlocks, forms
from irongrad.passes.manager import PassRecord
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.targets import parse_targets

# So small that the matrices of the tests come in blocks.
SMALL = RowBlocks(least=1, rows=8, sums=0.0)
LARGER = replace(SMALL, least=1 << 30)


@pytest.fixture(autouse=True)
def _every_matrix_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "_LEAST_MEASURED", 1)


class Layers(nn.Module):
    """Three layers of causal attention of equal sizes, and words to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        self.head = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


@pytest.fixture(scope="module", name="step")
def step_fixture() -> StepGraph:
    """The joint graph of a step, before the pass."""
    torch.manual_seed(0)
    model = Layers()
    inputs = {"x": torch.randn(3, 16, 8), "y": torch.randint(0, 32, (3, 16))}
    loss = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())  # noqa: E731
    step = ig.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    before = run_passes(step_graph(step), passes_at(2), ["llvm-cpu"])
    return replace(before, functions={"joint": before.functions["joint"]})


class Watch:
    """Reports times for the candidates in an order, and keeps what it was asked for."""

    def __init__(self, *order: str) -> None:
        self.order = order
        self.asked: dict[str, tuple[Mapping[str, Candidate], Sequence[torch.Tensor]]] = {}
        self.expected = 0

    def expect(self, count: int) -> None:
        self.expected += count

    def __call__(
        self, what: str, candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor]
    ) -> Measured | None:
        assert what not in self.asked
        self.asked[what] = candidates, operands
        default, *_ = candidates
        first = next((name for name in self.order if name in candidates), default)
        return Measured({name: 1.0 if name == first else 2.0 for name in candidates}, (first,))


def run(step: StepGraph, timer: Timer | None, pass_: RowBlocks = SMALL) -> tuple[StepGraph, PassRecord]:
    records: list[PassRecord] = []
    passes = [pass_, *parse_passes("cse,dce")]
    after = run_passes(step, passes, ["llvm-cpu"], lambda number, record, function: records.append(record), timer)
    return after, records[0]


def test_every_form_computes_the_same(step: StepGraph):
    """Equal attention is measured once; forward and backward of the last layer are one, and those of the loss."""
    watch = Watch()
    run(step, watch)
    assert len(watch.asked) == watch.expected == 3
    for candidates, operands in watch.asked.values():
        torch.manual_seed(1)
        values = [
            torch.randn(o.shape, dtype=torch.float64) if o.is_floating_point() else torch.zeros(o.shape, dtype=o.dtype)
            for o in operands
        ]
        expected, *others = (form(*values) for form in candidates.values())
        assert others
        for results in others:
            assert max(differences(list(expected), list(results))) < 1e-12


@pytest.mark.parametrize(
    ("order", "pass_", "expected"),
    [
        ((), SMALL, {"2 blocks", "6 blocks"}),
        (("4 blocks", "12 blocks"), SMALL, {"4 blocks", "12 blocks"}),
        (("whole",), SMALL, {"2 blocks", "6 blocks"}),  # memory would not be linear
        ((), LARGER, {"whole"}),
        (("4 blocks", "3 blocks"), LARGER, {"4 blocks", "3 blocks"}),
    ],
)
def test_measurement_decides(step: StepGraph, order: tuple[str, ...], pass_: RowBlocks, expected: set[str]):
    after, record = run(step, Watch(*order), pass_)
    assert {choice.chosen for choice in record.choices} == expected
    assert all(choice.what.startswith("softmax ") and choice.default in choice.seconds for choice in record.choices)
    blocks = sum(int(name.split()[0]) for name in expected if name != "whole")
    attention = next((int(n.split()[0]) for n in expected if n in ("2 blocks", "4 blocks")), 0)
    assert record.stats == {"blocks": blocks + 2 * attention}  # of three layers
    joint = step.functions["joint"].graph
    examples = _examples(joint)
    results = run_in_float64(joint, examples), run_in_float64(after.functions["joint"].graph, examples)
    assert max(differences(*results)) < 1e-12


def _examples(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    torch.manual_seed(1)
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    return [0.3 * torch.randn(v.shape) if v.is_floating_point() else torch.randint(0, 9, v.shape) for v in values]


class Nearly(Watch):
    """Reports forms that are faster than the default by less than the noise."""

    def __call__(self, what: str, candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor]) -> Measured:
        default, *others = candidates
        return Measured({default: 1.0, **dict.fromkeys(others, 0.5)})


class Spent(Watch):
    """Has no time left."""

    def __call__(self, what: str, candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor]) -> None:
        return None


def test_the_default_stays_unless_another_form_is_clearly_faster(step: StepGraph):
    _, default = run(step, None)
    _, nearly = run(step, Nearly())
    _, spent = run(step, Spent())
    assert default.stats == nearly.stats == spent.stats
    assert default.choices == spent.choices == ()


def attention_of(step_of: Callable[..., StepGraph], mask: torch.Tensor | None = None) -> StepGraph:
    """A graph of attention alone."""
    operands = [torch.randn(2, 2, 16, 4) for _ in range(3)]
    return step_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *operands)


def test_another_mask_is_another_computation(step_of):
    """A mask decides which columns a block computes."""

    def asked(mask: torch.Tensor | None) -> set[str]:
        watch = Watch()
        run(attention_of(step_of, mask), watch)
        return {*watch.asked}

    one, other = (torch.arange(16).view(-1, 1) % n >= torch.arange(16) % 3 for n in (5, 7))
    assert asked(one) == asked(one)
    assert len(asked(None) | asked(one) | asked(other)) == 3


def test_blocks_are_measured_on_this_machine(step_of):
    _, record = run(attention_of(step_of), Stopwatch(tuple(parse_targets(["llvm-cpu"]))))
    (choice,) = record.choices
    assert choice.seconds.keys() == {"2 blocks", "4 blocks"}
    assert min(choice.seconds.values()) > 0
    assert not choice.failed
