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
        inference: by entry point, state and its inputs -> its results, in evaluation mode: `eval` gives the loss, and
            `predict` the model's outputs.
        specialised: `joint` and `inference` for any size and for every bucket, the largest bucket last. The two fields
            above are those of the largest bucket. Empty for a step without buckets.
        output_sizes: for each function in evaluation mode, the sizes of each result, as numbers and expressions of
            named dimensions.
        bucket_limits: the sizes that a call may have in every bucket; each bucket's own sizes limit them further.
        limits: the sizes that any-size functions (with symbols as sizes) accept; None if there are no such functions.
        checks: for every function that relies on indices computed from inputs, the function that computes them early.
    """

    captured: CapturedStep
    state: tuple[StateTensor, ...]
    joint: Function
    inference: Mapping[str, Function]
    specialised: tuple[Specialised, ...] = ()
    output_sizes: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    bucket_limits: Limits = field(default_factory=Limits)
    limits: Limits | None = None
    checks: Mapping[str, Function] = field(default_factory=dict)


@dataclass(frozen=True)
class Specialised:
    """The functions of a step at the sizes of a bucket, with the true sizes as further arguments.

    Attributes:
        bucket: the bucket; None for any size, without further arguments.
        joint: as in `JointStep`.
        inference: as in `JointStep`.
    """

    bucket: Bucket | None
    joint: Function
    inference: Mapping[str, Function]


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

    def at(bucket: Bucket | None, *, plain: bool) -> tuple[Function, dict[str, Function]]:
        made = {
            name: traced(program, bucket if program.is_sized else None)
            for name, program in untraced.inference.items()
            if plain or program.is_sized
        }
        if "predict" in made and captured.step.loss is None:
            made["predict"] = _without_unused_inputs(made["predict"])
        return traced(untraced.joint, bucket), made

    checks: dict[str, Function] = {}

    def check(bucket: Bucket | None, *, plain: bool) -> None:
        for name, program in untraced.checks.items():
            if program.is_sized:
                made = _without_unused_inputs(traced(program, bucket))
                checks[name if plain else specialised_name(name, bucket)] = made
            elif plain:
                checks[name] = _without_unused_inputs(traced(program, None))

    check_buckets(untraced, captured.step.bucket_list)
    *others, largest = captured.step.bucket_list or (None,)
    functions = at(largest, plain=True)
    check(largest, plain=True)
    accepted = bucket_limits(untraced, needs, captured.step)  # every bucket has the same `needs`
    specialised: tuple[Specialised, ...] = ()
    if largest is not None:
        beside: list[Bucket | None] = [None] if captured.step.bucket_fallback else []
        specialised = (
            *(Specialised(b, *at(b, plain=False)) for b in [*beside, *others]),
            Specialised(largest, *functions),
        )
        for bucket in [*beside, *others]:
            check(bucket, plain=False)
    scale = loss_scale_of(captured.step)
    state = (
        *untraced.state.values(),
        *random_state((functions[0], *functions[1].values()), captured.step.seed),
        *(scale.state(len(captured.step.optimizers)) if scale is not None else ()),
    )
    output_sizes = {name: _output_sizes(program) for name, program in untraced.inference.items()}
    limits = any_size_limits(untraced, captured)
    return JointStep(captured, state, *functions, specialised, output_sizes, accepted, limits, checks)


def _output_sizes(program: Program) -> dict[str, tuple[Any, ...]]:
    """The sizes of each output of a program, by name."""
    return {r.name: sizes for r, sizes in zip(program.results, program.sizes, strict=True) if r.kind == "output"}


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
