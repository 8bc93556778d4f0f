"""Bisection names a wrong pass, whatever its error, and no pass that only rounds differently."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.nodes import call
from irongrad.passes import PassResult, passes_at
from irongrad.passes.graph.common_subexpressions import CommonSubexpressions
from irongrad.passes.graph.dead_code import DeadCode
from irongrad.pipeline.bisect.bisect import bisect
from irongrad.pipeline.driver import step_graph

aten = torch.ops.aten


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return nn.functional.dropout(self.layers(x), 0.3, self.training)


def _step(precision="f32"):
    torch.manual_seed(0)
    model = _Net()
    return ig.TrainStep(
        model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters()),
        {"x": torch.randn(5, 6), "y": torch.tensor([0, 1, 2, 0, 1])},
        dynamic={"x": {0: "B"}, "y": {0: "B"}}, buckets={"B": [4, 8]}, seed=3, precision=precision,
    )  # fmt: skip


@pytest.fixture(name="graph", scope="module")
def graph_fixture():
    return step_graph(_step())


@dataclass(frozen=True)
class Wrong:
    """A wrong pass: it applies its method `how` to every node that calls `operator` in the function `function`."""

    name: ClassVar[str] = "wrong"
    how: str
    operator: str = "mm.default"
    function: str = "joint"

    def run(self, graph, context):
        if context.function != self.function:
            return PassResult(False)
        found = [n for n in graph.graph.nodes if str(n.target) == f"aten.{self.operator}"]
        for node in found:
            with graph.graph.inserting_after(node):
                getattr(self, self.how)(graph.graph, node, context)
        return PassResult(bool(found), {"changed": len(found)})

    def _behind(self, graph, node, operator, *arguments, **keywords):
        new = call(graph, operator, node, *arguments, like=node, **keywords)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        graph.inserting_after(new)
        return new

    def rounds(self, graph, node, context):
        narrow = self._behind(graph, node, aten._to_copy.default, dtype=torch.bfloat16)
        self._behind(graph, narrow, aten._to_copy.default, dtype=torch.float32)

    def negates(self, graph, node, context):
        self._behind(graph, node, aten.neg.default)

    def counts(self, graph, node, context):
        start, end, *rest = node.args
        node.args = (start + 1, end + 1, *rest)

    def later(self, graph, node, context):
        """Double the result, except in the first step."""
        names = [a.name for a in context.arguments]
        steps = [n for n in graph.nodes if n.op == "placeholder"][names.index("irongrad/draws")]
        sign = call(graph, aten.sign.default, steps, like=node)
        graph.inserting_after(sign)
        factor = call(graph, aten.add.Scalar, sign, 1, like=node)
        graph.inserting_after(factor)
        self._behind(graph, node, aten.mul.Tensor, factor)

    def reorders(self, graph, node, context):
        """Sum the terms in reverse order, in float32: the rounding differs, the precision does not."""
        left, right = node.args
        with graph.inserting_before(node):
            flipped = [call(graph, aten.flip.default, a, [d], like=node) for a, d in ((left, 1), (right, 0))]
        node.args = tuple(flipped)


WRONG = {
    "rounds to bfloat16 and back": (Wrong("rounds"), 1, False),
    "drops a sign": (Wrong("negates"), 1, True),
    "another count of random numbers": (Wrong("counts", "arange.start_step"), 1, True),
    "in the second step alone": (Wrong("later"), 2, True),
    "in the update alone": (Wrong("rounds", "sqrt.default", "update"), 1, False),
    "in a bucket alone": (Wrong("negates", function="joint@B4"), 1, True),
    "in evaluation alone, digits": (Wrong("rounds", function="predict"), 1, False),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_pass_that_is_wrong_is_found(graph, what):
    wrong, step, changes_meaning = WRONG[what]
    found = bisect(graph, [CommonSubexpressions(), wrong, DeadCode()])
    assert not any(f.changes_numbers for f in found[:-1])
    assert (found[-1].name, found[-1].function) == ("wrong", wrong.function)
    assert (found[-1].changes_numbers, found[-1].changes_meaning) == (True, changes_meaning)
    assert found[-1].step >= step
    assert found[-1].stats["changed"] > 0


def test_a_sum_in_another_order_is_not_reported(graph):
    found = bisect(graph, [Wrong("reorders")])
    assert [f.function for f in found] == ["joint"]
    assert not found[0].changes_numbers


def test_rounding_to_the_half_precision_of_the_step_is_not_reported():
    """Bisection accepts all passes, and a rounding to bfloat16 that the step does itself. It finds a lost sign."""
    graph = step_graph(_step("bf16"))
    assert not any(f.changes_numbers for f in bisect(graph, passes_at(2)))
    assert not any(f.changes_numbers for f in bisect(graph, [Wrong("rounds")]))
    assert bisect(graph, [Wrong("negates")])[-1].changes_meaning


def test_functions_that_no_pass_changes_are_not_run(graph, monkeypatch):
    monkeypatch.setattr("irongrad.pipeline.bisect.bisect._Trial", None)
    assert bisect(replace(graph, functions={"update": graph.functions["update"]}), [DeadCode()]) == ()
