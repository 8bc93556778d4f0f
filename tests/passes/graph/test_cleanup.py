"""Dead code elimination and common subexpression elimination."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irongrad.passes.base import Context
from irongrad.passes.graph.common_subexpressions import CommonSubexpressions
from irongrad.passes.graph.dead_code import DeadCode

aten = torch.ops.aten


def test_dead_code_goes(step_of):
    graph = step_of(lambda x: x.relu(), torch.randn(3)).functions["call"].graph
    (x, relu, _) = graph.graph.nodes
    with graph.graph.inserting_after(relu):
        graph.graph.call_function(aten.sin.default, (x,))
    assert DeadCode().run(graph, Context("call")).stats == {"removed": 1}
    assert [n.name for n in graph.graph.nodes] == [x.name, relu.name, "output"]


def test_dead_bodies_of_control_flow_go(step_of):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)), x.exp()

    graph = step_of(fn, torch.randn(3)).functions["call"].graph
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    (call,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.cond)
    output.args = ([output.args[0][1]],)
    assert DeadCode().run(graph, Context("call")).changed
    assert call not in graph.graph.nodes
    assert not list(graph.named_children())


def test_writing_operators_stay(step_of):
    graph = step_of(lambda x: x.relu(), torch.randn(3)).functions["call"].graph
    (x, relu, _) = graph.graph.nodes
    with graph.graph.inserting_after(relu):
        graph.graph.call_function(aten.add_.Tensor, (x, 1))
        graph.graph.call_function(aten.rand.default, ([3],))
    assert not DeadCode().run(graph, Context("call")).changed


def test_equal_values_are_computed_once(apply):
    done = apply(CommonSubexpressions(), lambda x, y: (x * y).exp() + (x * y).exp(), torch.randn(3), torch.randn(3))
    assert done.stats == {"merged": 2}
    assert done.operators == {"aten.mul.Tensor": 1, "aten.exp.default": 1, "aten.add.Tensor": 1}


def test_constants_that_python_takes_for_equal_stay_apart(apply):
    done = apply(
        CommonSubexpressions(),
        lambda x: [torch.full_like(x, 1), torch.full_like(x, 1.0), torch.full_like(x, True), x / 0.0, x / -0.0],
        torch.tensor([1, 2, 3]),
    )
    assert not done.changed


def test_random_operators_are_not_merged(step_of):
    graph = step_of(lambda x: x.relu(), torch.randn(3)).functions["call"].graph
    (_, relu, _) = graph.graph.nodes
    with graph.graph.inserting_before(relu):
        for _ in range(2):
            graph.graph.call_function(aten.rand.default, ([3],))
    assert not CommonSubexpressions().run(graph, Context("call")).changed


def test_bodies_of_control_flow_are_graphs_of_their_own(apply):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.exp() * x.exp(), lambda x: x.neg(), (x,))

    assert apply(CommonSubexpressions(), fn, torch.randn(3)).stats == {"merged": 1}


@settings(max_examples=20, deadline=None)
@given(choices=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_random_programs_keep_their_numbers(apply, choices):
    makers = [torch.add, torch.mul, torch.sub, lambda a, b: a.sin(), lambda a, b: torch.maximum(a, b)]

    def fn(x, y):
        values = [x, y]
        for kind, left, right in choices:
            values.append(makers[kind](values[left % len(values)], values[right % len(values)]))
        return values[-3:]

    apply(CommonSubexpressions(), fn, torch.randn(4), torch.randn(4))
