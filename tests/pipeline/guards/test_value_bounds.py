"""Bounds contain every value that a node can have, and are tight enough to prove indices in range."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

from irongrad.pipeline.guards.index_ranges import expression_of
from irongrad.pipeline.guards.intervals import (
    INFINITE,
    UNKNOWN,
    Interval,
    at_most,
    join,
    number,
    plus,
    remainder,
    times,
)
from irongrad.pipeline.guards.value_bounds import Bounds, ConstantBounds, constant_bounds

INF = INFINITE


class _Run(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, i: Tensor, x: Tensor) -> Tensor:
        return self.function(i, x)


def _bounds(function: Callable[..., Tensor], known: Interval | None = None, **options: object) -> Interval:
    """The bounds of a function of integers, which have the bounds `known`, and of floats, both of shape [4, 6]."""
    examples = torch.arange(24).reshape(4, 6), torch.randn(4, 6)
    program = torch.export.export(_Run(function), examples, strict=False, **options)
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    constants = {
        placeholders[s.arg.name]: constant_bounds(program.constants[s.target])
        for s in program.graph_signature.input_specs
        if s.target in program.constants
    }
    given = {placeholders["i"]: known} if known is not None else {}
    (output,) = program.graph.output_node().args[0]
    return Bounds({**constants, **given}).of(output)


TABLE = torch.tensor([3, 1, 4, 1, 5])


def _inverse(i: Tensor, x: Tensor) -> Tensor:
    order = i.flatten().argsort()
    return torch.empty_like(order).index_put((order,), torch.arange(24))


PROVED: dict[str, tuple[Callable[..., Tensor], float, float]] = {
    "clamp": (lambda i, x: i.clamp(2, 9), 2, 9),
    "clamp by tensors": (lambda i, x: i.clamp(torch.tensor(1), torch.tensor(7)), 1, 7),
    "minimum of a maximum": (lambda i, x: i.maximum(torch.zeros_like(i)).minimum(torch.full_like(i, 5)), 0, 5),
    "remainder": (lambda i, x: i % 7, 0, 6),
    "remainder by a negative": (lambda i, x: i % -7, -6, 0),
    "fmod": (lambda i, x: torch.fmod(i, 7), -6, 6),
    "sum": (lambda i, x: i % 7 + 3, 3, 9),
    "difference": (lambda i, x: i % 7 - i % 3, -2, 6),
    "reversed difference": (lambda i, x: 10 - i % 7, 4, 10),
    "product": (lambda i, x: (i % 7) * -2, -12, 0),
    "floor division": (lambda i, x: (i % 7 - 3) // 2, -2, 1),
    "absolute": (lambda i, x: (i % 7 - 4).abs(), 0, 4),
    "bits of both": (lambda i, x: i & 31, 0, 31),
    "bits of either": (lambda i, x: (i % 7) | (i % 3), 0, 7),
    "shift": (lambda i, x: (i % 8) >> 1, 0, 3),
    "comparison": (lambda i, x: (i > 3).long(), 0, 1),
    "cumsum": (lambda i, x: (i > 3).long().cumsum(1), 0, 6),
    "sum of comparisons": (lambda i, x: (i > 3).sum(0), 0, 4),
    "argmax": (lambda i, x: x.argmax(1), 0, 5),
    "argmax of all": (lambda i, x: x.argmax(), 0, 23),
    "topk": (lambda i, x: x.topk(2, dim=0).indices, 0, 3),
    "max with places": (lambda i, x: x.max(1).indices, 0, 5),
    "argsort": (lambda i, x: i.argsort(1), 0, 5),
    "searchsorted": (lambda i, x: torch.searchsorted(torch.arange(5.0), x), 0, 5),
    "bucketize": (lambda i, x: torch.bucketize(x, torch.arange(5.0)), 0, 5),
    "multinomial": (lambda i, x: torch.multinomial(x.softmax(1), 2), 0, 5),
    "randint": (lambda i, x: torch.randint(2, 9, (4,)), 2, 8),
    "randperm": (lambda i, x: torch.randperm(9), 0, 8),
    "rand": (lambda i, x: (torch.rand(4) * 10).long(), 0, 9),
    "sigmoid": (lambda i, x: (x.sigmoid() * 9).long(), 0, 9),
    "tanh": (lambda i, x: ((x.tanh() + 1) * 4.4).long(), 0, 8),
    "softmax": (lambda i, x: (x.softmax(1) * 5).floor().long(), 0, 5),
    "round": (lambda i, x: (x.clamp(0, 7.4)).round().long(), 0, 7),
    "arange": (lambda i, x: torch.arange(3, 11, 2), 3, 9),
    "full": (lambda i, x: torch.full((3,), 7), 7, 7),
    "where": (lambda i, x: torch.where(x > 0, i % 3, 5), 0, 5),
    "where with the same tensor": (lambda i, x: torch.where((i >= 0) & (i < 9), i, 0), 0, 8),
    "masked fill of the same tensor": (lambda i, x: i.masked_fill((i < 1) | (i > 4), 2), 1, 4),
    "one hot": (lambda i, x: functional.one_hot(i % 3, 3), 0, 1),
    "cat": (lambda i, x: torch.cat([i % 3, i % 7]), 0, 6),
    "pad": (lambda i, x: functional.pad(i % 3, (0, 1), value=2), 0, 2),
    "constant": (lambda i, x: TABLE[i % 5], 1, 5),
    "embedding of a constant": (lambda i, x: functional.embedding(i % 5, TABLE[:, None]), 1, 5),
    "moves": (lambda i, x: (i % 7).t().reshape(2, 12)[1:].flip(0).to(torch.int32), 0, 6),
    "bytes": (lambda i, x: i.to(torch.uint8).long(), 0, 255),
    "tril": (lambda i, x: (i % 7 + 2).tril(), 0, 8),
    "inverse of an order": (_inverse, 0, 23),
    "split": (lambda i, x: (i % 7).split(2)[1], 0, 6),
}


@pytest.mark.parametrize(("function", "low", "high"), PROVED.values(), ids=PROVED.keys())
def test_bounds(function: Callable[..., Tensor], low: int, high: int):
    found = _bounds(function).whole()
    assert (found.low, found.high) == (low, high)


def test_bounds_hold_the_values_of_runs():
    torch.manual_seed(0)
    for function, low, high in PROVED.values():
        for i in (torch.arange(24).reshape(4, 6), torch.randint(-100, 100, (4, 6))):
            values = function(i, 4 * torch.randn(4, 6))
            assert low <= int(values.min()), function
            assert int(values.max()) <= high, function


UNPROVED: dict[str, Callable[..., Tensor]] = {
    "an input": lambda i, x: i,
    "floats": lambda i, x: x.long(),
    "a product": lambda i, x: i * 2,
    "a remainder by an input": lambda i, x: i % i,
    "an integer that wraps around": lambda i, x: ((i % 100).to(torch.int8) * 100).long() * 10**17,
    "uninitialised memory": lambda i, x: torch.empty_like(i[0]).index_put((i[0].argsort()[1:],), torch.arange(5)),
    "a sum with a scatter": lambda i, x: torch.zeros(4, 6, dtype=torch.int64).scatter_add(0, i % 4, i),
}


@pytest.mark.parametrize("function", UNPROVED.values(), ids=UNPROVED.keys())
def test_values_without_bounds(function: Callable[..., Tensor]):
    found = _bounds(function)
    assert (found.low, found.high) == (-INF, INF)


def test_narrow_integers_wrap_around():
    found = _bounds(lambda i, x: (i % 100).to(torch.int8) * 2)
    assert (found.low, found.high) == (-128, 127)


def test_bounds_of_an_input_lead_to_others():
    found = _bounds(lambda i, x: i + 1, Interval(0, 5))
    assert (found.low, found.high) == (1, 6)


def test_a_filler_stays_a_point_of_its_own():
    found = _bounds(lambda i, x: (i % 5).masked_fill(x > 0, -100))
    assert (found.low, found.high, found.points) == (0, 4, {-100})


def test_sizes_may_be_symbols():
    def function(i: Tensor, x: Tensor) -> Tensor:
        return torch.arange(i.shape[1]) + (i[0] > 0).long().cumsum(0)

    found = _bounds(function, dynamic_shapes={"i": {1: Dim("T")}, "x": None})
    (size,) = found.high.free_symbols
    assert at_most(found.high, 2 * size - 1)
    assert not at_most(found.high, 2 * size - 2)
    assert found.low == 0


def test_a_range_ends_at_the_size_of_a_call():
    found = _bounds(lambda i, x: i.clamp(0, i.shape[1] - 1), dynamic_shapes={"i": {1: Dim("T")}, "x": None})
    (size,) = found.high.free_symbols
    assert found.high == size - 1
    assert expression_of(5) == 5


def test_arithmetic_of_intervals():
    assert plus(Interval(1, 2), Interval(-INF, 3)) == Interval(-INF, 5)
    assert times(Interval(-2, 3), Interval(-5, 7)) == Interval(-15, 21)
    assert remainder(Interval(-9, 4), number(5), like_divisor=True, whole=True) == Interval(0, 4)
    assert remainder(Interval(1, 3), number(5), like_divisor=True, whole=True) == Interval(0, 3)
    assert join([Interval(0, 3), number(9)]).points == {9}
    assert join([Interval(0, 3), number(2)]).points == set()


def test_only_constants_that_are_asked_for_are_read() -> None:
    graph = torch.fx.Graph()
    asked, other = graph.placeholder("asked"), graph.placeholder("other")
    for node in (asked, other):
        node.meta["val"] = torch.empty(3)
    tensors = {asked: torch.tensor([2.0, -1.0, 0.5]), other: torch.ones(3)}
    constants = ConstantBounds(tensors)
    assert Bounds({}, constants=constants).of(asked) == Interval(-1.0, 2.0, exact=True)
    tensors[asked] = tensors[other] = torch.zeros(3)
    assert constants[asked] == Interval(-1.0, 2.0, exact=True)
    assert constants[other] == Interval(0.0, 0.0, exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_the_bounds_of_a_constant_are_those_of_its_values(dtype: torch.dtype) -> None:
    assert constant_bounds(torch.tensor([[0, 1], [1, 0]]).to(dtype)) == Interval(0, 1, exact=True)
    assert constant_bounds(torch.empty(0, dtype=dtype)) == UNKNOWN


def test_a_constant_that_is_not_finite_has_no_bounds() -> None:
    assert constant_bounds(torch.tensor([0.0, math.nan])) == UNKNOWN
    assert constant_bounds(torch.tensor([0.0, -math.inf])) == UNKNOWN
