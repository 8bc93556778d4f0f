"""`record` traces functions of tensors to the same graphs as `make_fx`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from irongrad.graph.nodes import kind_of
from irongrad.operators.legalize.retrace import interpret, retrace
from irongrad.passes.graph.convolutions.forms import forms_of
from irongrad.passes.graph.convolutions.problem import Problem, Window
from irongrad.passes.record_function import record
from irongrad.passes.rules import RULES, apply_rules


def spelled(graph: GraphModule) -> list[tuple[Any, ...]]:
    """Each node as its operator, its arguments and the type of its value, names aside."""
    apply_rules(graph, RULES)
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}

    def argument(value: Any) -> Any:
        return ("node", numbers[value]) if isinstance(value, Node) else repr(value)

    return [
        (
            n.op,
            n.op == "call_function" and n.target,
            *map(argument, tree_leaves((n.args, n.kwargs))),
            kind_of(n.meta.get("val")),
        )
        for n in graph.graph.nodes
    ]


def check(function: Callable[..., torch.Tensor], *kinds: tuple[Sequence[int], torch.dtype]) -> None:
    """Compare the recorded graph with the graph that `make_fx` traces."""
    examples = [torch.empty(sizes, dtype=dtype) for sizes, dtype in kinds]
    expected = retrace(lambda *tensors: [function(*tensors)], examples)
    assert spelled(record(function, kinds)) == spelled(expected)


@pytest.mark.parametrize(("stride", "kernel", "groups"), [(1, 3, 1), (2, 3, 1), (2, 1, 1), (1, 3, 8), (1, 3, 2)])
@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_forms_of_convolutions_are_recorded_as_make_fx_traces_them(kind, stride, kernel, groups) -> None:
    pad = kernel // 2
    out = (8 + 2 * pad - kernel) // stride + 1
    window = Window((8, 8), (out, out), (kernel, kernel), (stride, stride), (pad, pad), (1, 1))
    problem = Problem(kind, 16, (8, 8), groups, window)
    for form in forms_of(problem):
        check(
            lambda *operands, form=form: form.build(*operands, problem), *((s, torch.float32) for s in problem.shapes())
        )


def test_several_results_composite_operators_and_empty_tensors() -> None:
    check(lambda x: torch.var_mean(x, 1)[0] + x.topk(2, 1)[0].sum(1), ((3, 4), torch.float32))
    check(lambda x: torch.nn.functional.gelu(x.chunk(2, 1)[1]), ((3, 4), torch.float32))
    check(lambda x, y: torch.cat([x, y.new_zeros(0, 4), y], 0), ((3, 4), torch.float32), ((2, 4), torch.float32))


def test_constants_are_made_on_the_cpu() -> None:
    graph = record(lambda x: torch.where(torch.arange(4) == 1, x, 0), [((3, 4), torch.float32)])
    x = torch.ones(3, 4)
    assert interpret(graph, [x])[0].tolist() == [[0, 1, 0, 0]] * 3
    assert {n.meta["val"].device.type for n in graph.graph.nodes if "val" in n.meta} == {"cpu"}
