"""Decide on the indices of a function's graph, and add their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.legalize.constants import constants_as_state
from irongrad.operators.legalize.retrace import interpret_eager, retrace
from irongrad.pipeline.guards.decisions import Checks, Decided, Decisions, Indices
from irongrad.pipeline.guards.early_checks import Part, distances
from irongrad.pipeline.guards.float_indices import clamp, float_indices
from irongrad.pipeline.guards.index_ranges import View, verdicts_on
from irongrad.pipeline.guards.index_uses import without_assertions
from irongrad.pipeline.guards.range_checks import add_guards
from irongrad.pipeline.guards.value_bounds import ConstantBounds
from irongrad.pipeline.guards.written_memory import written


def function_indices(
    graph: GraphModule, inputs: Sequence[str], functional: Callable[[], GraphModule]
) -> tuple[Indices, Function | None]:
    """Decide on every index of a function, then clamp those in its graph that are computed from floats.

    The assertions are taken out of its graph.

    Args:
        graph: the function's graph.
        inputs: the names of its arguments.
        functional: makes a graph of the same function in which nothing writes into memory.

    Returns:
        The decisions, and the function that computes indices early; None if there is nothing to compute.

    Raises:
        CaptureError: an index is neither proved to be in range, nor can it be checked before a call begins.
    """
    flat = FlatGraph(graph)
    view = _view(graph, inputs, flat)
    opaque, verdicts = view.opaque, verdicts_on(view)
    made = Decided(verdicts, view.inputs, {})
    if verdicts.open:
        graph = functional()
        view = _view(graph, inputs, FlatGraph(graph))
        verdicts = verdicts_on(view)
        part = Part(graph, {*view.inputs, *view.known} - set(view.opaque), verdicts.bounds)
        made = Decided(verdicts, view.inputs, {}, part)
    decisions = Decisions()
    checks = decisions.add(made, "call").get("call", [])
    indices, early = decisions.indices(), None
    if checks:
        early = _early(made, checks)
    clamp(float_indices(flat.nodes, flat.makers, opaque))
    without_assertions(flat.nodes)
    return indices, early


def guarded(graph: StepGraph, indices: Indices, early: Function | None) -> StepGraph:
    """Add the checks of indices to the step graph of a function, and make its constants state.

    Args:
        graph: has the function `call` alone.
        indices: what keeps its indices within their tensors.
        early: computes indices at the start of a call; None if there is nothing to compute.
    """
    graph = constants_as_state(graph, "call")
    if early is None:
        return add_guards(graph, indices)
    return constants_as_state(add_guards(graph, indices, {"call": early}), "check.call")


def _early(made: Decided, checks: Checks) -> Function:
    assert made.part is not None
    early = distances(made.part, checks)
    taken = [n for n in early.graph.nodes if n.op == "placeholder"]
    names = {node.name: name for node, name in made.inputs.items()}
    traced = retrace(lambda *values: list(interpret_eager(early, values)), [n.meta["val"] for n in taken])
    arguments = tuple(Value("input", names[n.name]) for n in taken)
    return Function(traced, arguments, tuple(Value("output", r.input) for _, r in checks))


def _view(graph: GraphModule, inputs: Sequence[str], flat: FlatGraph) -> View:
    changed = written(flat)
    opaque = changed | flat.carried
    carries = {node: carry for node, carry in flat.carries.items() if node not in changed}
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    tensors = {n: name for n, name in zip(placeholders, inputs, strict=True) if _is_tensor(n)}
    constants = {
        n: value
        for n in graph.graph.nodes
        if n.op == "get_attr" and n not in opaque
        if isinstance(value := getattr(graph, str(n.target), None), torch.Tensor)
    }
    return View(flat.nodes, tensors, ConstantBounds(constants), {}, flat.makers, opaque, carries)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
