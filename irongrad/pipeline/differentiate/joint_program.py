"""The joint program: forward and backward of a captured step, differentiated by AOTAutograd."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

from irongrad.diagnostics import capture_errors, source_lines
from irongrad.graph.flat_graph import interpret_regions
from irongrad.graph.step_graph import Value
from irongrad.graph.subgraphs import has_while_loop
from irongrad.operators.legalize.complex_numbers import at_fixed_sizes
from irongrad.operators.legalize.retrace import interpret_eager
from irongrad.pipeline.capture.autograd_functions import calls_functions
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.hooks import gradient_hooks
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.program_checks import loss_node
from irongrad.pipeline.capture.side_effects import written_state
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.differentiate.specialise import Interpret, Program
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.dimensions import derived_of, dims_of, guards_of, named_sizes, names_of, symbolic_inputs
from irongrad.step.loss_scale import SCALE_VALUE
from irongrad.step.train_step import micro_batches


def joint_program(captured: CapturedStep, names: StateNames) -> Program:
    """Differentiate a step with AOTAutograd: forward and backward as one program.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    exported = captured.train.module(check_guards=False)
    inputs = micro_batches(captured.step.inputs, captured.step.accumulate)[0]
    joint = _exported_joint(captured, exported, names, inputs)
    pairs = _joint_arguments(joint, exported, names, inputs)
    arguments, examples = [value for value, _ in pairs], [example for _, example in pairs]
    beside = captured.output_names if captured.step.between else captured.value_names
    results, kept = _joint_results(joint, names, beside)
    if not any(r.kind == "gradient" for r in results):
        raise CaptureError(_no_gradient(captured))

    fake_inputs = _fakes(joint, PlainAOTInput)
    (tangent,) = (t.dtype for t in _fakes(joint, TangentAOTInput))
    dynamic, count = captured.step.dynamic, captured.step.accumulate
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


def _exported_joint(
    captured: CapturedStep, exported: nn.Module, names: StateNames, inputs: Mapping[str, torch.Tensor]
) -> torch.fx.GraphModule:
    """Export the joint graph of the captured forward, which is changed in place; tied tensors get one name."""
    _constants_as_buffers(exported)
    interpret_regions(exported)
    names.tie(exported)
    _written_as_buffers(exported, written_state(captured.train))
    try:
        with (
            ExitStack() as stack,
            plain_operators(),
            source_lines.quiet_export(),
            source_lines.failed_forward() as failed,
        ):
            # In torch 2.13, the fake tensors of a while_loop need torch.export's own symbols (`while_loop.py`).
            graph = captured.train.graph_module
            symbolic = bool(captured.step.dynamic) or has_while_loop(graph) or calls_functions(graph)
            values = symbolic_inputs(captured.train) if symbolic else tuple(v.detach() for v in inputs.values())
            joint: torch.fx.GraphModule = aot_export_joint_with_descriptors(stack, exported, values).graph_module
            _inherit_modules(joint)
            return joint
    except Exception as error:
        raise capture_errors.capture_error(error, captured.step.model, failed()) from error


def _inherit_modules(joint: torch.fx.GraphModule) -> None:
    """Give nodes of the backward the module of the node that they differentiate, for reports and messages."""
    for node in joint.graph.nodes:
        if stack := node.meta.get("fwd_nn_module_stack"):
            node.meta.setdefault("nn_module_stack", stack)


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
                raise CaptureError(
                    f"the step writes into {getattr(other, 'target', other)}; update a buffer in place, or return the "
                    "new value"
                )
            case PlainAOTOutput(idx=number):
                value = Value("output", ("loss", *outputs)[number])
            case GradAOTOutput(grad_of=ParamAOTInput(target=path)) if node is not None:
                value = Value("gradient", names.of(path))
            case _:
                continue
        results.append(value)
        kept.append(index)
    return results, kept
