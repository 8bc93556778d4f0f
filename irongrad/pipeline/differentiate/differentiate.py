"""CapturedStep -> JointStep: AOTAutograd's joint forward and backward graph, and the model's state by name."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from irongrad.diagnostics import capture_errors, source_lines
from irongrad.graph.flat_graph import interpret_regions
from irongrad.graph.step_graph import Function, StateTensor, Value, specialised_name
from irongrad.graph.subgraphs import has_while_loop
from irongrad.operators.legalize.complex_numbers import at_fixed_sizes, refuse_complex
from irongrad.operators.legalize.random_state import random_state
from irongrad.operators.legalize.retrace import interpret_eager
from irongrad.pipeline.capture.capture import CapturedStep, loss_node
from irongrad.pipeline.capture.hooks import gradient_hooks
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.side_effects import written_state
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.differentiate.inference import Table, inference_program, inference_table
from irongrad.pipeline.differentiate.specialise import Interpret, Program, specialise
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.pipeline.guards.decisions import EarlyProgram, Indices
from irongrad.pipeline.guards.range_checks import farthest
from irongrad.pipeline.guards.step_indices import step_indices, with_clamped_indices
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.dimensions import (
    derived_of,
    dims_of,
    guards_of,
    holds,
    named_sizes,
    names_of,
    relations_of,
    symbolic_inputs,
)
from irongrad.sizes.expressions import in_dimensions
from irongrad.sizes.limits import Limits, limits_of, limits_up_to, spelled
from irongrad.step.loss_scale import SCALE_VALUE, loss_scale_of
from irongrad.step.train_step import TrainStep, micro_batches, sizes_of


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


@dataclass(frozen=True)
class Programs:
    """The functions of a step before they are traced at a bucket's sizes or for any size.

    Attributes:
        state: the tensors of the model, and of a loss that is a module, by name.
        joint: as in `JointStep`.
        eval: as in `JointStep`.
        predict: as in `JointStep`.
        checks: as in `JointStep`, for functions of any bucket.
        conditions: relations between named dimensions under which all indices that depend on sizes alone are in range.
    """

    state: Mapping[str, StateTensor]
    joint: Program
    eval: Program | None
    predict: Program | None
    checks: Mapping[str, Program] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()


def programs(captured: CapturedStep, indices: Indices) -> Programs:
    """Build the programs of a step; a parameter that no gradient reaches has no gradient among the results.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    captured, step = with_clamped_indices(captured), captured.step
    names = StateNames(StepModule(step))
    refuse_complex({**step.inputs, **{n: t.initial for n, t in names.state.items()}})
    joint = joint_program(captured, names)
    evaluation, predict = None, None
    table = inference_table(dynamic=bool(step.dynamic)) if captured.eval or captured.predict or indices.early else {}
    if captured.eval is not None:
        evaluation = inference_program(captured.eval, names, step, table, tuple(step.inputs), ("loss",))
    if captured.predict is not None:
        predict = inference_program(
            captured.predict, names, step, table, captured.predict_inputs, captured.output_names
        )
    checks = {
        name: _check_program(early, names, step, table, step.accumulate if name == "joint" else 1)
        for name, early in indices.early.items()
    }
    return Programs(names.state, joint, evaluation, predict, checks, indices.conditions)


def _check_program(early: EarlyProgram, names: StateNames, step: TrainStep, table: Table, count: int) -> Program:
    """The program of a check; that of a step with `count` micro-batches runs on each of them."""
    program = inference_program(early.program, names, step, table, early.inputs, early.results)
    if count == 1:
        return program

    def run(interpret: Interpret, *values: torch.Tensor) -> list[torch.Tensor]:
        is_cut = [a.kind == "input" and v.ndim > 0 for a, v in zip(program.arguments, values, strict=True)]
        parts = [v.chunk(count) if cut else [v] * count for v, cut in zip(values, is_cut, strict=True)]
        rows = [program.run(interpret, *part) for part in zip(*parts, strict=True)]
        return [farthest(torch.stack(list(same))) for same in zip(*rows, strict=True)]

    return replace(program, run=run)


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

    _check_buckets(untraced, captured.step.bucket_list)
    *others, largest = captured.step.bucket_list or (None,)
    functions = at(largest)
    check(largest, plain=True)
    bucket_limits = _bucket_limits(untraced, needs, captured.step)  # every bucket has the same `needs`
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
    limits = _limits(untraced, captured)
    return JointStep(captured, state, *functions, specialised, output_sizes, bucket_limits, limits, checks)


def _conditions(untraced: Programs) -> list[Any]:
    """The conditions on named dimensions under which the captured graphs are right."""
    found = [program for program in (untraced.joint, untraced.eval, untraced.predict) if program is not None]
    own = [
        condition
        for program in found
        for condition in (
            *(in_dimensions(guard.xreplace(dict(program.names))) for guard in program.guards),
            *relations_of(program.derived),
        )
    ]
    return [*own, *untraced.conditions]


def _limits(untraced: Programs, captured: CapturedStep) -> Limits | None:
    """The sizes that any-size functions accept; None if the step has no such functions."""
    step = captured.step
    if not step.dynamic or (step.bucket_list and not step.bucket_fallback):
        return None
    return limits_of([*_conditions(untraced), *step.conditions], list(sizes_of(step, step.inputs)))


def _bucket_limits(untraced: Programs, needs: set[Any], step: TrainStep) -> Limits:
    """The sizes that a step with buckets accepts, up to its largest bucket.

    Raises:
        CaptureError: the step needs a condition that some of these sizes violate, or a bucket holds no input.
    """
    buckets = step.bucket_list
    if not buckets:
        return Limits()
    known = (*step.conditions, *relations_of(untraced.joint.derived))
    largest = {name: max(bucket[name] for bucket in buckets) for name in buckets[0]}
    limits = limits_up_to([*(need >= 0 for need in needs), *_conditions(untraced)], largest, step.conditions)
    if gaps := [c for c in limits.conditions if len(c.free_symbols) == 1 and c not in known]:
        needs_text = ", ".join(map(spelled, gaps))
        names = ", ".join(sorted(repr(s.name) for c in gaps for s in c.free_symbols))
        raise CaptureError(
            f"this model or loss needs {needs_text}, which not all sizes up to the largest bucket {largest} satisfy. "
            f"Say so in constraints=, or leave {names} out of dynamic"
        )
    for bucket in buckets:
        for name, size in bucket.items():
            if size < limits.smallest[name]:
                raise CaptureError(
                    f"bucket {dict(bucket)} holds no input: {name} must be at least {limits.smallest[name]}"
                )
    return limits


def _check_buckets(untraced: Programs, buckets: Sequence[Bucket]) -> None:
    """Refuse a bucket whose own sizes the program does not accept, because the bucket runs at these sizes.

    Raises:
        CaptureError: there is such a bucket.
    """
    equal = [c for c in _conditions(untraced) if isinstance(c, sympy.Eq) and len(c.free_symbols) > 1]
    for condition in (*relations_of(untraced.joint.derived), *equal):
        for bucket in buckets:
            if not holds(condition, bucket):
                raise CaptureError(
                    f"the model or the loss needs {spelled(condition)}, and the bucket {dict(bucket)} runs at its own "
                    "sizes. Choose sizes for which that holds, or a list of combinations; calls at others are refused"
                )


def joint_program(captured: CapturedStep, names: StateNames) -> Program:
    """Differentiate a step with AOTAutograd: forward and backward as one program.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    exported = captured.train.module(check_guards=False)
    _constants_as_buffers(exported)
    interpret_regions(exported)
    names.tie(exported)
    _written_as_buffers(exported, written_state(captured.train))
    count = captured.step.accumulate
    inputs = micro_batches(captured.step.inputs, count)[0]
    dynamic = captured.step.dynamic
    try:
        with (
            ExitStack() as stack,
            plain_operators(),
            source_lines.quiet_export(),
            source_lines.failed_forward() as failed,
        ):
            # In torch 2.13, the fake tensors of a while_loop need torch.export's own symbols (`while_loop.py`).
            symbolic = bool(dynamic) or has_while_loop(captured.train.graph_module)
            values = symbolic_inputs(captured.train) if symbolic else tuple(v.detach() for v in inputs.values())
            joint = aot_export_joint_with_descriptors(stack, exported, values).graph_module
    except Exception as error:
        raise capture_errors.capture_error(error, exported, failed()) from error
    pairs = _joint_arguments(joint, exported, names, inputs)
    arguments, examples = [value for value, _ in pairs], [example for _, example in pairs]
    results, kept = _joint_results(joint, names, captured.output_names if captured.step.between else ())
    if not any(r.kind == "gradient" for r in results):
        raise CaptureError(_no_gradient(captured))

    fake_inputs = _fakes(joint, PlainAOTInput)
    (tangent,) = (t.dtype for t in _fakes(joint, TangentAOTInput))
    dims = dims_of(inputs, dynamic)
    symbols = names_of(fake_inputs, dims)
    portable = at_fixed_sizes(joint, symbols)
    plain = len(arguments)
    hooked = _gradient_hooks(captured, names, results)
    for value in dict.fromkeys(v for hook in hooked.values() for v in hook.values):
        if value not in arguments:
            arguments.append(value)
            examples.append(names.state[value.name].initial)
    scaled = captured.step.scaler is not None
    if scaled:
        arguments.append(SCALE_VALUE)
        examples.append(torch.ones(()))

    def run(interpret: Interpret, *values: torch.Tensor) -> list[torch.Tensor]:
        taken, scale = (values[:-1], values[-1]) if scaled else (values, torch.ones((), dtype=tangent))
        seed = scale / count if count > 1 else scale
        given = dict(zip(arguments, taken, strict=False))
        outputs = interpret(portable, (*taken[:plain], seed.to(tangent)))
        return [
            _hooked(hooked.get(r.name), outputs[i], given, r.name) if r.kind == "gradient" else outputs[i]
            for r, i in zip(results, kept, strict=True)
        ]

    sizes = tuple(named_sizes(joint.graph.output_node().args[0][i].meta["val"], symbols) for i in kept)
    derived = derived_of(fake_inputs, dims, symbols)
    return Program(
        run, tuple(arguments), tuple(examples), tuple(results), sizes, symbols, dynamic, guards_of(fake_inputs), derived
    )


@dataclass(frozen=True)
class _Hooked:
    """The gradient hooks of a parameter.

    Attributes:
        graph: takes the gradient, and what `values` stand for.
        values: the parameter, then other tensors that the hooks read.
    """

    graph: torch.fx.GraphModule
    values: tuple[Value, ...]


def _gradient_hooks(captured: CapturedStep, names: StateNames, results: Sequence[Value]) -> dict[str, _Hooked]:
    """The traced hooks of the parameters that get a gradient, by name."""
    module = StepModule(captured.step)
    with_gradient = {r.name for r in results if r.kind == "gradient"}
    parameters = {names.of(n): p for n, p in module.named_parameters()}
    wanted = {n: p for n, p in parameters.items() if n in with_gradient}
    tensors = {p.data_ptr(): names.of(n) for n, p in (*module.named_buffers(), *module.named_parameters())}
    found: dict[str, _Hooked] = {}
    for name, hook in gradient_hooks(wanted, captured.step.accumulate).items():
        values = [Value("state", name)]
        for node in hook.graph.graph.find_nodes(op="get_attr"):
            constant = hook.constants[str(node.target)]
            of_model = tensors.get(constant.data_ptr())
            values.append(Value("state", of_model or names.constant(str(node.target), constant)))
        found[name] = _Hooked(_constants_as_arguments(hook.graph), tuple(values))
    return found


def _constants_as_arguments(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Make the tensors that a graph holds further arguments of it, in order."""
    last = graph.graph.find_nodes(op="placeholder")[-1]
    for node in graph.graph.find_nodes(op="get_attr"):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"held_{node.target}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _hooked(
    hook: _Hooked | None, gradient: torch.Tensor, given: Mapping[Value, torch.Tensor], name: str
) -> torch.Tensor:
    if hook is None:
        return gradient
    (changed,) = interpret_eager(hook.graph, [gradient, *(given[v] for v in hook.values)])
    if changed.shape != gradient.shape:
        raise CaptureError(f"a gradient hook of the parameter {name!r} changes the shape of the gradient")
    return changed.to(gradient.dtype)


def _joint_arguments(
    joint: torch.fx.GraphModule, exported: nn.Module, names: StateNames, inputs: Mapping[str, torch.Tensor]
) -> list[tuple[Value, torch.Tensor]]:
    """The value that each argument stands for, with an example; the cotangent of the loss is left out."""
    constants = {**dict(exported.named_buffers()), **dict(exported.named_parameters())}
    taken: list[tuple[Value, torch.Tensor]] = []
    for node in joint.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case ParamAOTInput(target=path) | BufferAOTInput(target=path):
                name = names.of(path) if path in names else names.constant(path, constants[path])
                taken.append((Value("state", name), names.state[name].initial))
            case PlainAOTInput(idx=index):
                name = list(inputs)[index]
                taken.append((Value("input", name), inputs[name]))
            case TangentAOTInput():
                pass
            case other:
                raise CaptureError(f"AOTAutograd made an argument that IronGrad does not know: {other}")
    return taken


def _fakes(joint: torch.fx.GraphModule, descriptor: type) -> list[torch.Tensor]:
    """The fake tensors of the arguments that have a descriptor of this class."""
    nodes = joint.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in nodes if isinstance(node.meta["desc"], descriptor)]


def _constants_as_buffers(exported: nn.Module) -> None:
    """Turn the tensor constants of a forward into arguments; AOTAutograd would embed them in the graph."""
    for module in exported.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _written_as_buffers(exported: nn.Module, written: Collection[str]) -> None:
    """Turn parameters that the forward writes into buffers: no optimizer holds them, so they need no gradient."""
    named = exported.named_parameters(remove_duplicate=False)
    tensors = {id(p): p.detach() for n, p in named if n in written}
    for module in exported.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in tensors:
                delattr(module, name)
                module.register_buffer(name, tensors[id(parameter)], persistent=False)


def _no_gradient(captured: CapturedStep) -> str:
    model = captured.step.model
    if not any(p.requires_grad for p in model.parameters()):
        return f"{source_lines.where(model)}: every parameter of the model is frozen (requires_grad=False)"
    place = source_lines.line_of(loss_node(captured.train), otherwise=source_lines.where(model))
    return f"{place}\n  no parameter gets a gradient. Is it computed under torch.no_grad(), or from detached tensors?"


def _joint_results(
    joint: torch.fx.GraphModule, names: StateNames, outputs: Sequence[str]
) -> tuple[list[Value], list[int]]:
    """The values that the results stand for (loss, `outputs`, updated buffers, gradients), and their positions."""
    output = joint.graph.output_node()
    results: list[Value] = []
    kept: list[int] = []
    for index, (node, descriptor) in enumerate(zip(output.args[0], output.meta["desc"], strict=True)):
        match descriptor:
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=path)):
                value = Value("state", names.of(path))
            case InputMutationAOTOutput(mutated_input=other):
                raise CaptureError(f"the step writes into {other}; update a buffer in place, or return the new value")
            case PlainAOTOutput(idx=number):
                value = Value("output", ("loss", *outputs)[number])
            case GradAOTOutput(grad_of=ParamAOTInput(target=path)) if node is not None:
                value = Value("gradient", names.of(path))
            case _:
                continue
        results.append(value)
        kept.append(index)
    return results, kept


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
