"""CapturedStep -> JointStep: AOTAutograd's joint forward and backward graph, and the model's state by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
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
from torch._ops import OperatorBase
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule

from irongrad.buckets import Bucket
from irongrad.decompositions import is_ours
from irongrad.pipeline import usercode
from irongrad.pipeline.capture import MODEL_PREFIX, CapturedStep, StepModule, loss_node, plain_operators
from irongrad.pipeline.complex import has_complex, in_reals, refuse_complex
from irongrad.pipeline.dimensions import Names, guards_of, named_sizes, names_of, smallest_sizes, symbolic_inputs
from irongrad.pipeline.drawing import random_state
from irongrad.pipeline.graphs import Function, StateTensor, Value
from irongrad.pipeline.limits import Limits, limits_of
from irongrad.pipeline.scaling import SCALE_VALUE, loss_scale_of
from irongrad.pipeline.specialise import Interpret, Program, specialise
from irongrad.pipeline.table_limits import table_conditions
from irongrad.random import is_random
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.runtime.manifest import Role
from irongrad.step import TrainStep, micro_batches, sizes_of

Table = dict[OperatorBase, Callable[..., Any]]


@dataclass(frozen=True)
class JointStep:
    """The differentiated step, before its optimizer.

    Attributes:
        captured: what it was made from.
        state: parameters, buffers and constants of the model (and of a loss that is a module), the seed and count of
            random draws, and the loss scale.
        joint: state and inputs of a micro-batch -> updated buffers, loss, gradients (its part of the mean over all
            micro-batches, scaled where there is a loss scale).
        eval: state and inputs -> loss; None where it was not captured, as with `predict`.
        predict: state and model inputs -> the model's outputs; None where there are none.
        specialised: those three for every bucket, and for any size beside them, the largest bucket last; the three
            above are its. Empty for a step without buckets.
        output_sizes: of each result of `predict`, as numbers and expressions of named dimensions.
        smallest: the smallest size of each named dimension that the buckets take.
        limits: the sizes that functions of any size take; None where there are none.
    """

    captured: CapturedStep
    state: tuple[StateTensor, ...]
    joint: Function
    eval: Function | None
    predict: Function | None
    specialised: tuple[Specialised, ...] = ()
    output_sizes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    smallest: Mapping[str, int] = field(default_factory=dict)
    limits: Limits | None = None


@dataclass(frozen=True)
class Specialised:
    """`joint`, `eval` and `predict` of a step at the sizes of a bucket, with the true sizes as further arguments.

    Without a bucket, for any size.
    """

    bucket: Bucket | None
    joint: Function
    eval: Function | None
    predict: Function | None


@dataclass(frozen=True)
class Programs:
    """The functions of a step before they are traced at fixed sizes.

    Attributes:
        state: the tensors of the model, and of a loss that is a module, by name.
        joint: as in `JointStep`, as are the others.
        eval: as above.
        predict: as above.
    """

    state: Mapping[str, StateTensor]
    joint: Program
    eval: Program | None
    predict: Program | None


def programs(captured: CapturedStep) -> Programs:
    """Build the joint graph; parameters that no gradient reaches simply have none in the results.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    step = captured.step
    names = StateNames(StepModule(step))
    refuse_complex({**step.inputs, **{n: t.initial for n, t in names.state.items()}})
    joint = joint_program(captured, names)
    evaluation, predict = None, None
    table = _inference_table(dynamic=bool(step.dynamic)) if captured.eval or captured.predict else {}
    if captured.eval is not None:
        evaluation = _inference(captured.eval, names, step, table, tuple(step.inputs), ("loss",))
    if captured.predict is not None:
        predict = _inference(captured.predict, names, step, table, captured.predict_inputs, captured.output_names)
    return Programs(names.state, joint, evaluation, predict)


def differentiate(captured: CapturedStep) -> JointStep:
    """Build the functions of the step, at its own sizes or at those of its buckets.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
        UnsupportedOpError: an operator that cannot be compiled, or not padded exactly.
    """
    made = programs(captured)

    needs: set[Any] = set()

    def traced(program: Program, bucket: Bucket | None) -> Function:
        function, new = specialise(program, bucket)
        needs.update(new)
        return function

    def at(bucket: Bucket | None) -> tuple[Function, Function | None, Function | None]:
        evaluation = traced(made.eval, bucket) if made.eval is not None else None
        predict = traced(made.predict, bucket) if made.predict is not None else None
        if predict is not None and captured.step.loss is None:
            predict = _without_unused_inputs(predict)
        return traced(made.joint, bucket), evaluation, predict

    *others, largest = captured.step.bucket_list or (None,)
    functions = at(largest)
    smallest = _smallest_sizes(made, needs, captured.step.bucket_list)  # which is the same in every bucket
    specialised: tuple[Specialised, ...] = ()
    if largest is not None:
        beside: list[Bucket | None] = [None] if captured.step.bucket_fallback else []
        specialised = (*(Specialised(b, *at(b)) for b in [*beside, *others]), Specialised(largest, *functions))
    scale = loss_scale_of(captured.step)
    state = (
        *made.state.values(),
        *random_state(functions, captured.step.seed),
        *(scale.state(len(captured.step.optimizers)) if scale is not None else ()),
    )
    made_sizes = zip(made.predict.results, made.predict.sizes, strict=True) if made.predict is not None else ()
    output_sizes = {r.name: sizes for r, sizes in made_sizes if r.kind == "output"}
    return JointStep(captured, state, *functions, specialised, output_sizes, smallest, _limits(made, captured))


def _conditions(made: Programs) -> list[Any]:
    """What has to be true of named dimensions for the graphs to be those of the programs."""
    found = [program for program in (made.joint, made.eval, made.predict) if program is not None]
    return [guard.xreplace(dict(program.names)) for program in found for guard in program.guards]


def _limits(made: Programs, captured: CapturedStep) -> Limits | None:
    """The sizes that functions of any size take."""
    step = captured.step
    if not step.dynamic or (step.bucket_list and not step.bucket_fallback):
        return None
    conditions = _conditions(made)
    for program in filter(None, (captured.train, captured.eval)):
        names = names_of(symbolic_inputs(program), [step.dynamic.get(n, {}) for n in step.inputs])
        conditions += table_conditions(program, names)
    return limits_of(conditions, list(sizes_of(step, step.inputs)))


def _smallest_sizes(made: Programs, needs: set[Any], buckets: Sequence[Bucket]) -> dict[str, int]:
    """The smallest size of each named dimension that the step takes.

    Raises:
        CaptureError: a bucket that holds none, or sizes that cannot be said so.
    """
    limits = {name: max(bucket[name] for bucket in buckets) for bucket in buckets[:1] for name in bucket}
    conditions = [need >= 0 for need in needs] + _conditions(made)
    smallest = smallest_sizes(conditions, limits)
    for bucket in buckets:
        for name, size in bucket.items():
            if size < smallest[name]:
                raise CaptureError(f"bucket {dict(bucket)} holds no input: {name} must be at least {smallest[name]}")
    return smallest


def name_of(path: str) -> str:
    """The state name of an attribute path of `StepModule`: the model's own name for it."""
    return path.removeprefix(MODEL_PREFIX)


class StateNames:
    """PyTorch names of the step's tensors; all names of a tied tensor lead to the first of them."""

    def __init__(self, module: StepModule) -> None:
        self.state: dict[str, StateTensor] = {}
        self._canonical: dict[str, str] = {}
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        tensors: list[tuple[str, torch.Tensor]] = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for path, tensor in tensors:
            name = name_of(path)
            name = first.setdefault(id(tensor), name)
            self._canonical[path] = name
            if name != name_of(path):
                aliases.setdefault(name, []).append(name_of(path))
        for path, tensor in tensors:
            name = self._canonical[path]
            role = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.BUFFER
            initial = tensor.detach().cpu()
            self.state[name] = StateTensor(name, role, initial, tuple(aliases.get(name, ())))

    def of(self, path: str) -> str:
        """The state name of an attribute path of the step module."""
        return self._canonical[path]

    def constant(self, path: str, tensor: torch.Tensor) -> str:
        """Register a tensor constant of an exported graph and return its state name.

        The programs of one step number their constants each for itself, so a path says nothing; equal ones are shared.
        """
        value = tensor.detach().cpu()
        refuse_complex({path: value})
        constants = [t for t in self.state.values() if t.role is Role.CONSTANT]
        for known in constants:
            if known.initial.dtype == value.dtype and torch.equal(known.initial, value):
                return known.name
        name = f"constant/{len(constants)}.{path.rpartition('.')[2]}"
        self.state[name] = StateTensor(name, Role.CONSTANT, value)
        return name

    def tie(self, exported: nn.Module) -> None:
        """Make tied tensors of an exported module one object again; torch.export gives each name its own."""
        owners: dict[str, torch.Tensor] = {}
        for path, name in self._canonical.items():
            parent_path, _, attribute = path.rpartition(".")
            try:
                parent = exported.get_submodule(parent_path)
                tensor = getattr(parent, attribute)
            except AttributeError:
                continue  # a tensor that the forward does not use is not in the exported module
            shared = owners.setdefault(name, tensor)
            if shared is not tensor:
                setattr(parent, attribute, shared)


def joint_program(captured: CapturedStep, names: StateNames) -> Program:
    """Forward and backward of a step by AOTAutograd.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    exported = captured.train.module(check_guards=False)
    _constants_as_buffers(exported)
    names.tie(exported)
    count = captured.step.accumulate
    inputs = micro_batches(captured.step.inputs, count)[0]
    dynamic = captured.step.dynamic
    try:
        with ExitStack() as stack, plain_operators(), usercode.quiet_export():
            values = symbolic_inputs(captured.train) if dynamic else tuple(v.detach() for v in inputs.values())
            joint = aot_export_joint_with_descriptors(stack, exported, values).graph_module
    except Exception as error:
        raise usercode.capture_error(error, exported) from error
    constants = {**dict(exported.named_buffers()), **dict(exported.named_parameters())}
    arguments: list[Value] = []
    examples: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    for node in [n for n in joint.graph.nodes if n.op == "placeholder"]:
        match node.meta["desc"]:
            case ParamAOTInput(target=path) | BufferAOTInput(target=path):
                name = names.of(path) if path in names._canonical else names.constant(path, constants[path])
                arguments.append(Value("state", name))
                examples.append(names.state[name].initial)
            case PlainAOTInput(idx=index):
                given.append(node.meta["val"])
                arguments.append(Value("input", list(inputs)[index]))
                examples.append(list(inputs.values())[index])
            case TangentAOTInput():
                tangent = node.meta["val"].dtype
            case other:
                raise CaptureError(f"AOTAutograd made an argument that IronGrad does not know: {other}")
    results, kept = _joint_results(joint, names, captured.output_names if captured.step.between else ())
    if not any(r.kind == "gradient" for r in results):
        raise CaptureError(_no_gradient(captured))

    symbols = names_of(given, [dynamic.get(n, {}) for n in inputs])
    portable = _in_reals(joint, symbols)
    scaled = captured.step.scaler is not None
    if scaled:
        arguments.append(SCALE_VALUE)
        examples.append(torch.ones(()))

    def run(interpret: Interpret, *values: torch.Tensor) -> list[torch.Tensor]:
        taken, scale = (values[:-1], values[-1]) if scaled else (values, torch.ones((), dtype=tangent))
        seed = scale / count if count > 1 else scale
        outputs = interpret(portable, (*taken, seed.to(tangent)))
        return [outputs[i] for i in kept]

    sizes = tuple(named_sizes(joint.graph.output_node().args[0][i].meta["val"], symbols) for i in kept)
    return Program(run, tuple(arguments), tuple(examples), tuple(results), sizes, symbols, dynamic, guards_of(given))


def _in_reals(graph: GraphModule, symbols: Names) -> GraphModule:
    """`in_reals`, of a graph of fixed sizes.

    Raises:
        UnsupportedOpError: complex values in a graph with named dimensions.
    """
    if symbols and has_complex(graph):
        raise UnsupportedOpError("a step with dynamic dimensions cannot have complex values inside; leave out dynamic")
    return in_reals(graph)


def _constants_as_buffers(exported: nn.Module) -> None:
    """Make the tensor constants of a forward arguments of its graph; AOTAutograd would write them into it."""
    for module in exported.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _no_gradient(captured: CapturedStep) -> str:
    model = captured.step.model
    if not any(p.requires_grad for p in model.parameters()):
        return f"{usercode.where(model)}: every parameter of the model is frozen (requires_grad=False)"
    place = usercode.line_of(loss_node(captured.train), otherwise=usercode.where(model))
    return f"{place}\n  no parameter gets a gradient. Is it computed under torch.no_grad(), or from detached tensors?"


def _joint_results(
    joint: torch.fx.GraphModule, names: StateNames, outputs: Sequence[str]
) -> tuple[list[Value], list[int]]:
    """What the results stand for: the loss, the model's `outputs`, updated buffers and gradients."""
    output = next(n for n in reversed(joint.graph.nodes) if n.op == "output")
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
    """Drop inputs that no result depends on: the labels of a model that makes its own loss."""
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


def _inference_table(*, dynamic: bool) -> Table:
    """torch.export's decompositions without operators that are decomposed here later, as in the joint graph.

    A random operator too is left as it is, so that it makes one draw, as in eager. With dynamic sizes there are those
    alone that autograd takes apart too, so that a joint graph has none of them.
    """
    composite = DispatchKey.CompositeImplicitAutograd
    with plain_operators(), usercode.quiet_export():
        return {
            operator: decomposition
            for operator, decomposition in default_decompositions().items()
            if not is_random(operator) and not is_ours(operator)
            and (not dynamic or operator.has_kernel_for_dispatch_key(composite))
        }  # fmt: skip


def _inference(
    program: ExportedProgram,
    names: StateNames,
    step: TrainStep,
    table: Table,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Program:
    with plain_operators(), usercode.quiet_export():
        program = program.run_decompositions(table)
    symbols = names_of(symbolic_inputs(program), [step.dynamic.get(n, {}) for n in inputs])
    arguments: list[Value] = []
    examples: list[torch.Tensor] = []
    remaining = list(inputs)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(Value("input", remaining.pop(0)))
            examples.append(step.inputs[arguments[-1].name])
            continue
        path = str(spec.target)
        if path in names._canonical:
            name = names.of(path)
        else:
            tensor = program.constants[path] if path in program.constants else program.state_dict[path]
            name = names.constant(path, tensor)
        arguments.append(Value("state", name))
        examples.append(names.state[name].initial)
    results: list[Value] = []
    left = list(outputs)
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            results.append(Value("state", names.of(str(spec.target))))
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(Value("output", left.pop(0)))
        else:
            raise CaptureError(f"evaluation writes into an input ({spec}); return the new value instead")
    portable = _in_reals(program.graph_module, symbols)

    def run(interpret: Interpret, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        return interpret(portable, values)

    sizes = tuple(named_sizes(n.meta["val"], symbols) for n in portable.graph.output_node().args[0])
    guards = guards_of(symbolic_inputs(program))
    return Program(run, tuple(arguments), tuple(examples), tuple(results), sizes, symbols, step.dynamic, guards)
