"""CapturedStep -> JointStep: AOTAutograd's joint forward and backward graph, and the model's state by name."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass

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
from torch.export import CustomDecompTable, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind

from irongrad.decompositions import is_ours
from irongrad.pipeline import usercode
from irongrad.pipeline.capture import MODEL_PREFIX, CapturedStep, StepModule, loss_node, plain_operators
from irongrad.pipeline.complex import in_reals, refuse_complex
from irongrad.pipeline.drawing import random_state, trace
from irongrad.pipeline.graphs import Function, StateTensor, Value
from irongrad.pipeline.retrace import interpret_eager
from irongrad.random import is_random
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import Role


@dataclass(frozen=True)
class JointStep:
    """The differentiated step, before its optimizer.

    Attributes:
        captured: what it was made from.
        state: parameters, buffers and constants of the model (and of a loss that is a module), and the seed and count
            of random draws.
        joint: state and inputs -> updated buffers, loss, gradients.
        eval: state and inputs -> loss.
        predict: state and model inputs -> the model's outputs; None where there are none.
    """

    captured: CapturedStep
    state: tuple[StateTensor, ...]
    joint: Function
    eval: Function
    predict: Function | None


def differentiate(captured: CapturedStep) -> JointStep:
    """Build the joint graph; parameters that no gradient reaches simply have none in the results.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    module = StepModule(captured.step)
    names = _StateNames(module)
    inputs = captured.step.inputs
    refuse_complex({**inputs, **{n: t.initial for n, t in names.state.items()}})
    joint = _joint(captured, names)
    evaluation = _inference(captured.eval, names, tuple(inputs), ("loss",))
    predict = None
    if captured.predict is not None:
        predict = _inference(captured.predict, names, captured.predict_inputs, captured.output_names)
        if captured.step.loss is None:
            predict = _without_unused_inputs(predict)
    state = (*names.state.values(), *random_state((joint, evaluation, predict), captured.step.seed))
    return JointStep(captured, state, joint, evaluation, predict)


def name_of(path: str) -> str:
    """The state name of an attribute path of `StepModule`: the model's own name for it."""
    return path.removeprefix(MODEL_PREFIX)


class _StateNames:
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


def _joint(captured: CapturedStep, names: _StateNames) -> Function:
    exported = captured.train.module(check_guards=False)
    _constants_as_buffers(exported)
    names.tie(exported)
    inputs = captured.step.inputs
    try:
        with ExitStack() as stack, plain_operators(), usercode.quiet_export():
            values = tuple(v.detach() for v in inputs.values())
            joint = aot_export_joint_with_descriptors(stack, exported, values).graph_module
    except Exception as error:
        raise usercode.capture_error(error, exported) from error
    constants = {**dict(exported.named_buffers()), **dict(exported.named_parameters())}
    arguments: list[Value] = []
    examples: list[torch.Tensor] = []
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        match node.meta["desc"]:
            case ParamAOTInput(target=path) | BufferAOTInput(target=path):
                name = names.of(path) if path in names._canonical else names.constant(path, constants[path])
                arguments.append(Value("state", name))
                examples.append(names.state[name].initial)
            case PlainAOTInput(idx=index):
                arguments.append(Value("input", list(inputs)[index]))
                examples.append(list(inputs.values())[index])
            case TangentAOTInput():
                examples.append(torch.ones((), dtype=node.meta["val"].dtype))
            case other:
                raise CaptureError(f"AOTAutograd made an argument that IronGrad does not know: {other}")
    results, kept = _joint_results(joint, names)
    if not any(r.kind == "gradient" for r in results):
        raise CaptureError(_no_gradient(captured))

    portable = in_reals(joint)

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        ones = torch.ones((), dtype=placeholders[-1].meta["val"].dtype)
        outputs = interpret_eager(portable, (*values, ones))
        return [outputs[i] for i in kept]

    given = [e for e, n in zip(examples, placeholders, strict=True) if not _is_tangent(n)]
    return trace(run, given, arguments, results)


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


def _is_tangent(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["desc"], TangentAOTInput)


def _joint_results(joint: torch.fx.GraphModule, names: _StateNames) -> tuple[list[Value], list[int]]:
    output = next(n for n in reversed(joint.graph.nodes) if n.op == "output")
    results: list[Value] = []
    kept: list[int] = []
    for index, (node, descriptor) in enumerate(zip(output.args[0], output.meta["desc"], strict=True)):
        match descriptor:
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=path)):
                value = Value("state", names.of(path))
            case InputMutationAOTOutput(mutated_input=other):
                raise CaptureError(f"the step writes into {other}; update a buffer in place, or return the new value")
            case PlainAOTOutput():
                value = Value("output", "loss")
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


def _without_ours(table: CustomDecompTable) -> CustomDecompTable:
    """`table` without operators that are decomposed here later, as in the joint graph.

    A random operator too is left as it is, so that it makes one draw, as in eager.
    """
    for operator in [op for op in table if is_random(op) or is_ours(op)]:
        table.pop(operator)
    return table


def _inference(
    program: ExportedProgram, names: _StateNames, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Function:
    with plain_operators(), usercode.quiet_export():
        program = program.run_decompositions(_without_ours(default_decompositions()))
    arguments: list[Value] = []
    examples: list[torch.Tensor] = []
    remaining = list(inputs)
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(Value("input", remaining.pop(0)))
            examples.append(torch.empty_like(by_name[spec.arg.name].meta["val"], device="cpu"))
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
    portable = in_reals(program.graph_module)
    return trace(lambda *v: interpret_eager(portable, v), examples, arguments, results)
