"""What tests of passes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from irongrad.passes import Pass, run_passes
from irongrad.passes.dead_code import DeadCode
from irongrad.passes.wide import differences, run_wide
from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.retrace import retrace


def step_of(
    fn: Callable[..., Any], *examples: torch.Tensor, function: str = "call", decompose: bool = True
) -> StepGraph:
    """A step graph whose only function is `fn`, which returns a tensor or several."""

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = fn(*tensors)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    graph = retrace(flat, examples, decompose=decompose)
    inputs = {f"x{i}": e for i, e in enumerate(examples)}
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    results = tuple(Value("output", f"result{i}") for i in range(len(output.args[0])))
    arguments = tuple(Value("input", n) for n in inputs)
    return StepGraph((), (), inputs, {}, functions={function: Function(graph, arguments, results)})


def operators(graph: GraphModule) -> Counter[str]:
    """How often each operator is called."""
    return Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")


@dataclass(frozen=True)
class Rewritten:
    """A function before and after a pass."""

    before: GraphModule
    after: GraphModule
    stats: dict[str, int]
    changed: bool

    @property
    def operators(self) -> Counter[str]:
        """The operators after the pass."""
        return operators(self.after)


def apply(
    item: Pass,
    fn: Callable[..., Any],
    *examples: torch.Tensor,
    decompose: bool = True,
    target: str = "llvm-cpu",
    **keywords: Any,
) -> Rewritten:
    """Run a pass on `fn`, and hold it to what every pass has to do.

    A second run changes nothing, and the numbers stay: on the examples, run in float64. What a pass leaves without
    users is for dead code elimination.
    """
    step = step_of(fn, *examples, decompose=decompose, **keywords)
    ((name, function),) = step.functions.items()
    records = []
    once = run_passes(step, [item, DeadCode()], [target], lambda number, record, function: records.append(record))
    run_passes(once, [item], [target], lambda number, record, function: records.append(record))
    first, _, second = records
    assert not second.changed, f"a second run of {item.name} changes the graph again: {second}"
    before, after = function.graph, once.functions[name].graph
    if not first.changed:
        assert operators(before) == operators(after)
    assert max(differences(run_wide(before, examples), run_wide(after, examples))) < 1e-12
    return Rewritten(before, after, dict(first.stats), first.changed)


@pytest.fixture(name="apply", scope="session")
def apply_fixture() -> Callable[..., Rewritten]:
    """`apply`, as a fixture, since test files import nothing from each other."""
    return apply


@pytest.fixture(name="step_of", scope="session")
def step_of_fixture() -> Callable[..., StepGraph]:
    """`step_of`, as a fixture."""
    return step_of
