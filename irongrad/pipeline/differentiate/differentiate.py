"""CapturedStep -> JointStep: AOTAutograd's joint forward and backward graph, and the model's state by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from irongrad.graph.step_graph import Function, StateTensor, Value, specialised_name
from irongrad.operators.legalize.random_state import random_state
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.differentiate.programs import programs
from irongrad.pipeline.differentiate.size_limits import any_size_limits, bucket_limits, check_buckets
from irongrad.pipeline.differentiate.specialise import Program, specialise
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.limits import Limits
from irongrad.step.loss_scale import loss_scale_of


@dataclass(frozen=True)
class JointStep:
    """The differentiated step, before its optimizer.

    Attributes:
        captured: the captured step.
        state: parameters, buffers and constants of the model (and of a loss that is a module), the seed and count of
            random draws, and the loss scale.
        joint: state and inputs of a micro-batch -> updated buffers, loss, gradients. A gradient is the micro-batch's
            part of the mean over all micro-batches, multiplied by the loss scale if there is one.
        eval: state and inputs -> loss; None if it was not captured.
        predict: state and model inputs -> the model's outputs; None if it was not captured.
        specialised: `joint`, `eval` and `predict` for any size and for every bucket, the largest bucket last. The three
            fields above are those of the largest bucket. Empty for a step without buckets.
        output_sizes: the sizes of each result of `predict`, as numbers and expressions of named dimensions.
        bucket_limits: the sizes that a call may have in every bucket; each bucket's own sizes limit them further.
        limits: the sizes that any-size functions (with symbols as sizes) accept; None if there are no such functions.
        checks: for every function that relies on indices computed from inputs, the function that computes them early.
    """

    captured: CapturedStep
    state: tuple[StateTensor, ...]
    joint: Function
    eval: Function | None
    predict: Function | None
    specialised: tuple[Specialised, ...] = ()
    output_sizes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    bucket_limits: Limits = field(default_factory=Limits)
    limits: Limits | None = None
    checks: Mapping[str, Function] = field(default_factory=dict)


@dataclass(frozen=True)
class Specialised:
    """`joint`, `eval` and `predict` of a step at the sizes of a bucket, with the true sizes as further arguments.

    Attributes:
        bucket: the bucket; None for any size, without further arguments.
        joint: as in `JointStep`.
        eval: as in `JointStep`.
        predict: as in `JointStep`.
    """

    bucket: Bucket | None
    joint: Function
    eval: Function | None
    predict: Function | None


def differentiate(captured: CapturedStep, indices: Indices | None = None) -> JointStep:
    """Build the functions of the step, at its own sizes, at the sizes of its buckets, or for any size.

    Args:
        captured: the step.
        indices: what keeps its indices within their tensors; decided on here if it is None.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
        UnsupportedOpError: an operator cannot be compiled, or cannot be padded exactly.
    """
    untraced = programs(captured, indices if indices is not None else step_indices(captured))
    needs: set[Any] = set()

    def traced(program: Program, bucket: Bucket | None) -> Function:
        function, new = specialise(program, bucket)
        needs.update(new)
        return function

    def at(bucket: Bucket | None) -> tuple[Function, Function | None, Function | None]:
        evaluation = traced(untraced.eval, bucket) if untraced.eval is not None else None
        predict = traced(untraced.predict, bucket) if untraced.predict is not None else None
        if predict is not None and captured.step.loss is None:
            predict = _without_unused_inputs(predict)
        return traced(untraced.joint, bucket), evaluation, predict

    checks: dict[str, Function] = {}

    def check(bucket: Bucket | None, *, plain: bool) -> None:
        for name, program in untraced.checks.items():
            made = _without_unused_inputs(traced(program, bucket))
            checks[name if plain else specialised_name(name, bucket)] = made

    check_buckets(untraced, captured.step.bucket_list)
    *others, largest = captured.step.bucket_list or (None,)
    functions = at(largest)
    check(largest, plain=True)
    accepted = bucket_limits(untraced, needs, captured.step)  # every bucket has the same `needs`
    specialised: tuple[Specialised, ...] = ()
    if largest is not None:
        beside: list[Bucket | None] = [None] if captured.step.bucket_fallback else []
        specialised = (*(Specialised(b, *at(b)) for b in [*beside, *others]), Specialised(largest, *functions))
        for bucket in [*beside, *others]:
            check(bucket, plain=False)
    scale = loss_scale_of(captured.step)
    state = (
        *untraced.state.values(),
        *random_state(functions, captured.step.seed),
        *(scale.state(len(captured.step.optimizers)) if scale is not None else ()),
    )
    predict_sizes = (
        zip(untraced.predict.results, untraced.predict.sizes, strict=True) if untraced.predict is not None else ()
    )
    output_sizes = {r.name: sizes for r, sizes in predict_sizes if r.kind == "output"}
    limits = any_size_limits(untraced, captured)
    return JointStep(captured, state, *functions, specialised, output_sizes, accepted, limits, checks)


def _without_unused_inputs(function: Function) -> Function:
    """Drop inputs that no result depends on: the labels of a model that computes its own loss."""
    graph = copy.deepcopy(function.graph)
    arguments: list[Value] = []
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node, argument in zip(placeholders, function.arguments, strict=True):
        if argument.kind == "input" and not node.users:
            graph.graph.erase_node(node)
        else:
            arguments.append(argument)
    graph.recompile()
    return Function(graph, tuple(arguments), function.results)
