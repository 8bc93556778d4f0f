"""JointStep -> StepGraph: the optimizer's update beside the joint graph, and the state of both."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from irongrad.passes.dead_code import eliminate_dead_code
from irongrad.pipeline.differentiate import JointStep
from irongrad.pipeline.graphs import Function, StateTensor, StepGraph, Value
from irongrad.pipeline.optimizer_state import steps_so_far
from irongrad.pipeline.optimizer_trace import Update, trace_update
from irongrad.pipeline.retrace import retrace
from irongrad.pipeline.scalars import ScalarsToTensors
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import STEPS, Role

COUNT = Value("count", "accumulated")


def add_optimizer(joint: JointStep) -> StepGraph:
    """Trace the update and build the functions of the step graph.

    Raises:
        CaptureError: an optimizer whose state or update cannot be captured, or a hyperparameter that has the
            name of an input.
    """
    update = trace_update(joint)
    steps = StateTensor(STEPS, Role.COUNTER, steps_so_far(update.state))
    state = (*joint.state, *update.state, steps)
    inputs = joint.captured.step.inputs
    hypers = {h.name: h.default for h in update.hypers}
    if clash := sorted(set(hypers) & set(inputs)):
        raise CaptureError(f"inputs {clash} have the names of the optimizer's hyperparameters; rename the inputs")
    functions = {
        "joint": _joint_function(joint, update),
        "update": _update_function(joint, update),
        "accumulate": _accumulate_function(joint, update),
        "mean": _mean_function(joint, update),
        "eval": joint.eval,
    }
    if joint.predict is not None:
        functions["predict"] = joint.predict
    fixed = {h.name: h.default for h in update.fixed}
    return StepGraph(state, update.parameters, inputs, hypers, fixed, functions)


def _update_arguments(update: Update) -> list[Value]:
    return [
        *(Value("state", n) for n in update.parameters),
        *(Value("gradient", n) for n in update.parameters),
        *(Value("state", t.name) for t in update.state),
        Value("state", STEPS),
        *(Value("hyper", h.name) for h in update.hypers),
    ]


def _update_results(update: Update) -> list[Value]:
    return [*(Value("state", n) for n in update.parameters), *(Value("state", t.name) for t in update.state)]


def _run_update(update: Update, values: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Run the update graph on tensors; the step count rises by one."""
    outputs = ScalarsToTensors(update.graph).run(
        *(values[a] for a in _update_arguments(update)), enable_io_processing=False
    )
    steps = Value("state", STEPS)
    results = dict(zip(_update_results(update), outputs, strict=True))
    like = {v: values[v] for v in results}
    return {v: t.to(like[v].dtype).reshape(like[v].shape) for v, t in results.items()} | {steps: values[steps] + 1}


def _examples(joint: JointStep, update: Update) -> dict[Value, torch.Tensor]:
    examples = {Value("state", t.name): t.initial for t in (*joint.state, *update.state)}
    examples[Value("state", STEPS)] = torch.zeros((), dtype=torch.int64)
    examples |= {Value("hyper", h.name): torch.zeros((), dtype=torch.float64) for h in update.hypers}
    for kind in ("gradient", "accumulator"):
        examples |= {Value(kind, n): examples[Value("state", n)] for n in update.parameters}
    examples[COUNT] = torch.ones((), dtype=torch.float64)
    examples |= {Value("input", n): t for n, t in joint.captured.step.inputs.items()}
    return examples


def _update_function(joint: JointStep, update: Update) -> Function:
    arguments = _update_arguments(update)
    results = [*_update_results(update), Value("state", STEPS)]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        new = _run_update(update, dict(zip(arguments, tensors, strict=True)))
        return [new[r] for r in results]

    examples = _examples(joint, update)
    return Function(retrace(run, [examples[a] for a in arguments]), tuple(arguments), tuple(results))


def _joint_function(joint: JointStep, update: Update) -> Function:
    """The joint graph without gradients of parameters that no optimizer holds."""
    whole = joint.joint
    kept = [i for i, r in enumerate(whole.results) if r.kind != "gradient" or r.name in update.parameters]
    graph = copy.deepcopy(whole.graph)
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    output.args = ([output.args[0][i] for i in kept],)
    eliminate_dead_code(graph)
    graph.recompile()
    return Function(graph, whole.arguments, tuple(whole.results[i] for i in kept))


def _accumulate_function(joint: JointStep, update: Update) -> Function:
    """Gradients added to the accumulators."""
    gradients = [Value("gradient", n) for n in update.parameters]
    accumulators = [Value("accumulator", n) for n in update.parameters]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        half = len(gradients)
        return [total + gradient for gradient, total in zip(tensors[:half], tensors[half:], strict=True)]

    examples = _examples(joint, update)
    arguments = (*gradients, *accumulators)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, tuple(accumulators))


def _mean_function(joint: JointStep, update: Update) -> Function:
    """Accumulated sums divided by their number."""
    arguments = (*(Value("accumulator", n) for n in update.parameters), COUNT)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        *sums, count = tensors
        return [total / count for total in sums]

    examples = _examples(joint, update)
    results = tuple(Value("gradient", n) for n in update.parameters)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, results)
