"""The front of the compiler: the stages up to the step graph, which `compile` and `check` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from irongrad.diagnostics.refusals import refused_together
from irongrad.graph.step_graph import StepGraph
from irongrad.operators.legalize.legality import check_operators
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.differentiate.differentiate import JointStep, differentiate
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.range_checks import add_guards
from irongrad.pipeline.guards.step_indices import changed_tensors, named_tensors, step_indices
from irongrad.pipeline.optimizer.after_update import AfterUpdate, trace_after
from irongrad.pipeline.optimizer.split_step import cut
from irongrad.pipeline.optimizer.update import add_optimizer

# Runs a function of some arguments as the stage of a name, and returns the result.
Stage = Callable[..., Any]


def plainly(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a stage, and do nothing else."""
    return function(*arguments)


def front(captured: CapturedStep, stage: Stage, beside: Iterable[CapturedStep] = ()) -> StepGraph:
    """Run the stages from `differentiate` to `guards`; return the step graph.

    Args:
        captured: the step.
        stage: runs a stage.
        beside: other steps over the state, whose changes no proof may rule out.

    Raises:
        CaptureError: an index is neither proved to be in range, nor can it be checked before a step begins.
        UnsupportedOpError: operators that cannot be compiled, all of them together.
    """
    with refused_together():
        after = trace_after(captured.step)
        changed = _changed_after(captured, after)
        for one in beside:
            changed |= changed_tensors(one) | _changed_after(one, trace_after(one.step))
        indices: Indices = step_indices(captured, changed)
        joint: JointStep = stage("differentiate", differentiate, captured, indices)
        graph: StepGraph = stage("optimizer", add_optimizer, joint, after)
        graph = cut(graph, captured.step.between)
        graph = stage("guards", add_guards, graph, indices, joint.checks)
        check_operators(graph)
    return graph


def _changed_after(captured: CapturedStep, after: AfterUpdate | None) -> set[int]:
    """The ids of the tensors that change after an update."""
    return named_tensors(captured, after.changed) if after is not None else set()
