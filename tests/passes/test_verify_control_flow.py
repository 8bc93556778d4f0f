"""The verifier compares the operands and results of control flow with the arguments and results of its bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from irongrad.graph.nodes import call, computed_value
from irongrad.passes import PassResult, run_passes
from irongrad.runtime.errors import InternalError

aten, control = torch.ops.aten, torch.ops.higher_order


def choice(x, y):
    return torch.cond(x.sum() > 0, lambda x, y: x * y, lambda x, y: x + y, (x, y))


def loop(x, y):
    return while_loop(lambda a, b: a.sum() < 9, lambda a, b: (a + 1, b * 2), (x, y))


def rows(x, y):
    return scan(lambda state, row: (state + row, (state * row).sum()), y[0], x)


def each(x, y):
    return map_rows(lambda row, other: row * other, x, y)


@dataclass(frozen=True)
class Breaks:
    """Break the node of control flow with `how`."""

    name: ClassVar[str] = "breaks"
    how: Callable[..., None]

    def run(self, graph, context):
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                graph.graph.inserting_before(node)
                self.how(graph, node)
        return PassResult(True)


def with_argument(place, new):
    """Replace the argument at `place` by `new` of the node and that argument."""

    def change(graph, node):
        node.update_arg(place, new(node, node.args[place]))

    return change


def as_float64(node, value):
    return call(node.graph, aten._to_copy.default, value, like=node, dtype=torch.float64)


def smaller(node, value):
    return call(node.graph, aten.slice.Tensor, value, 0, 0, 1, like=node)


def body_with(place, change):
    """Replace the body at `place` by a copy with the same name, whose results `change` has changed."""

    def swap(graph, node):
        name = str(node.args[place].target)
        body = torch.fx.GraphModule(getattr(graph, name), torch.fx.Graph())
        results = body.graph.graph_copy(getattr(graph, name).graph, {})
        body.graph.output(change(body.graph, results))
        setattr(graph, name, body)

    return swap


def first_as_float64(graph, results):
    first, *rest = results if isinstance(results, list | tuple) else [results]
    new = graph.call_function(aten._to_copy.default, (first,), {"dtype": torch.float64})
    new.meta["val"] = computed_value(new)
    return [new, *rest]


def with_value(change):
    """Replace `meta["val"]` by `change` of it."""

    def replace(graph, node):
        node.meta["val"] = change(list(node.meta["val"]))

    return replace


BROKEN = {
    "cond: an operand is missing": (choice, with_argument(3, lambda n, v: v[:1]), "and have to be 1: "),
    "cond: of another dtype": (choice, with_argument(3, lambda n, v: [as_float64(n, v[0]), v[1]]), "the arguments of"),
    "cond: of another shape": (choice, with_argument(3, lambda n, v: [v[0], smaller(n, v[1])]), "the arguments of"),
    "cond: a predicate of numbers": (choice, with_argument(0, as_float64), "the predicate is no condition"),
    "cond: a branch gives another dtype": (choice, body_with(2, first_as_float64), "the results of false_graph_0"),
    "cond: a branch gives more": (choice, body_with(1, lambda g, r: [*r, *r]), "the results of true_graph_0"),
    "cond: other results": (choice, with_value(lambda v: [v[0].double()]), "the results of true_graph_0"),
    "while_loop: an operand is missing": (loop, with_argument(2, lambda n, v: v[:1]), "the arguments of while_loop_"),
    "while_loop: more operands": (loop, with_argument(3, lambda n, v: (n.args[2][0],)), "the arguments of"),
    "while_loop: no condition": (loop, body_with(0, first_as_float64), "the result of while_loop_cond"),
    "while_loop: the body gives another dtype": (loop, body_with(1, first_as_float64), "the results of while_l"),
    "while_loop: other results": (loop, with_value(lambda v: v[:1]), "the results of the loop are 1: "),
    "scan: a carry of another shape": (rows, with_argument(1, lambda n, v: [smaller(n, v[0])]), "the arguments of"),
    "scan: rows of another dtype": (rows, with_argument(2, lambda n, v: [as_float64(n, v[0])]), "the arguments of"),
    "scan: sequences of two lengths": (
        rows, with_argument(2, lambda n, v: [v[0], smaller(n, v[0])]), "the sequences have the lengths {"
    ),
    "scan: the body carries another dtype on": (rows, body_with(0, first_as_float64), "carries on are"),
    "scan: a stack too few": (rows, with_value(lambda v: v[:1]), "the results of the loop are 1: "),
    "map: an operand is missing": (each, with_argument(2, lambda n, v: ()), "the arguments of"),
    "map: fewer rows": (each, with_argument(1, lambda n, v: [smaller(n, v[0])]), "the results of the loop"),
    "map: the body gives another dtype": (each, body_with(0, first_as_float64), "the results of the loop"),
    "arguments are not its own": (each, with_argument(1, lambda n, v: v[0]), "its arguments are not those of"),
}  # fmt: skip


@pytest.fixture(name="steps", scope="module")
def steps_fixture(step_of):
    return {f: step_of(f, torch.randn(5, 3), torch.randn(5, 3)) for f in (choice, loop, rows)} | {
        each: step_of(each, torch.randn(5, 3), torch.randn(3))
    }


@pytest.mark.parametrize("what", BROKEN)
def test_control_flow_that_does_not_fit_its_bodies_is_named(steps, what):
    function, how, message = BROKEN[what]
    with pytest.raises(InternalError, match="the pass 'breaks' left a graph that is not well formed") as caught:
        run_passes(steps[function], [Breaks(how)])
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [choice, loop, rows, each])
def test_control_flow_that_fits_its_bodies_is_accepted(steps, function):
    run_passes(steps[function], [Breaks(lambda graph, node: None)])
