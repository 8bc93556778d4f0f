"""Functions that are called many times while a graph is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from irongrad.operators.decompositions.repetition import Repeated
from irongrad.operators.legalize.retrace import interpret, retrace

STEPS = 6
Function = Callable[..., list[Tensor]]


def cell(x: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> list[Tensor]:
    """A cell that is not symmetric in `h` and `c`, and has an operator with a decomposition."""
    c = torch.rsub(h, 1.0) * c + x
    return [torch.tanh(c @ weight) + h, c, weight]


def unrolled(function: Function, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Call `function` for each row of `x`; both parts of the initial state are the same tensor."""
    h = c = torch.zeros_like(x[0])
    for row in x:
        h, c, weight = function(row, h, c, weight)
    return [h, c]


class Counting:
    def __init__(self, function: Function) -> None:
        self._function, self.calls = function, 0

    def __call__(self, *values: Tensor) -> list[Tensor]:
        self.calls += 1
        return self._function(*values)


def traced(make: Callable[[Function], Function]) -> tuple[GraphModule, int]:
    counting = Counting(cell)
    examples = [torch.ones(STEPS, 3, 4), torch.ones(4, 4)]
    return retrace(lambda x, w: unrolled(make(counting), x, w), examples), counting.calls


def test_copied_nodes_equal_the_nodes_of_traced_calls() -> None:
    (plain, every), (copied, few) = traced(lambda function: function), traced(Repeated)
    assert (every, few) == (STEPS, 2)
    assert copied.code == plain.code
    for node, other in zip(copied.graph.nodes, plain.graph.nodes, strict=True):
        assert node.name == other.name
        if node.op == "call_function":
            assert node.meta["val"].shape == other.meta["val"].shape
            assert node.meta["val"].dtype == other.meta["val"].dtype
    values = [torch.randn(STEPS, 3, 4), torch.randn(4, 4)]
    torch.testing.assert_close(list(interpret(copied, values)), unrolled(cell, *values))


def test_calls_with_other_shapes_are_traced_again() -> None:
    counting = Counting(lambda x: [x + 1])
    repeated = Repeated(counting)
    graph = retrace(lambda *xs: [y for x in xs for y in repeated(x)], [torch.ones(2), torch.ones(2), torch.ones(3)])
    assert counting.calls == 2
    given = [torch.randn(2), torch.randn(2), torch.randn(3)]
    torch.testing.assert_close(list(interpret(graph, given)), [x + 1 for x in given])


def test_eager_code_calls_the_function_every_time() -> None:
    counting = Counting(cell)
    values = [torch.randn(STEPS, 3, 4), torch.randn(4, 4)]
    torch.testing.assert_close(unrolled(Repeated(counting), *values), unrolled(cell, *values))
    assert counting.calls == STEPS


def test_calls_with_symbolic_sizes_are_traced_again() -> None:
    counting = Counting(lambda x: [x + 1])
    repeated = Repeated(counting)
    retrace(lambda x: repeated(*repeated(x)), [torch.ones(4)], dims=[{0: "N"}])
    assert counting.calls == 2


@pytest.mark.parametrize("function", [lambda x: [x], lambda x: [torch.ones(2) + 0, x]])
def test_results_may_be_arguments_or_independent_of_them(function: Function) -> None:
    def run(x: Tensor) -> list[Tensor]:
        repeated = Repeated(function)
        return [*repeated(x), *repeated(x * 2)]

    graph = retrace(run, [torch.ones(2)])
    x = torch.randn(2)
    torch.testing.assert_close(list(interpret(graph, [x])), [*function(x), *function(x * 2)])
