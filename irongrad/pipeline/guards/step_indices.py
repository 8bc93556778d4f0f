"""Decide on the indices of a step's exported programs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_structure

from irongrad.diagnostics.source_lines import quiet_export
from irongrad.graph.derivatives import differentiates
from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.step_graph import Relied, relied_by_both
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.decompose import decompose
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.step_modules import StepModule, name_of
from irongrad.pipeline.guards.decisions import Checks, Decided, Decisions, EarlyProgram, Indices
from irongrad.pipeline.guards.early_checks import Part, distances
from irongrad.pipeline.guards.float_indices import clamp, float_indices
from irongrad.pipeline.guards.index_ranges import View, verdicts_on
from irongrad.pipeline.guards.index_uses import Use, assertions_of, without_assertions
from irongrad.pipeline.guards.kept_state import with_kept_state
from irongrad.pipeline.guards.relied_bounds import relied_bounds
from irongrad.pipeline.guards.value_bounds import ConstantBounds
from irongrad.pipeline.guards.written_memory import written
from irongrad.sizes.dimensions import Dynamic, Names, names_in_program


def step_indices(captured: CapturedStep, changed: Collection[int] = ()) -> Indices:
    """Decide on every index of a step.

    Args:
        captured: the step.
        changed: the ids of further tensors that change: by `after_step`, or in another step.

    Raises:
        CaptureError: an index is neither proved to be in range, nor can it be checked before a step begins.
    """
    step = captured.step
    inputs, joint = tuple(step.inputs), "forward" if step.between else "joint"
    programs = [(joint, captured.train, inputs)]
    programs += [(name, made.program, made.inputs) for name, made in captured.inference.items()]
    decisions, early, relied = Decisions(), dict[str, EarlyProgram](), dict[str, Relied]()
    written = [_written(captured, program) for _, program, _ in programs]
    for number, (name, program, taken) in enumerate(programs):
        elsewhere = set(changed).union(*written[:number], *written[number + 1 :])
        functional, made = _decided(
            program, taken, step.dynamic, _paths(captured, elsewhere | written[number]), _paths(captured, elsewhere)
        )
        for path, what in _by_path(functional, made.relied).items():
            both = relied_by_both(what, relied.get(path))
            assert both is not None
            relied[path] = both
        first = captured.call.positional + captured.call.keyword if name == "forward" else None
        for piece, checks in decisions.add(made, name, first).items():
            early[piece] = _early(functional, made, checks, taken)
    return replace(decisions.indices(early), relied=relied)


def changed_tensors(captured: CapturedStep) -> set[int]:
    """The ids of all tensors that programs of a step change."""
    return set[int]().union(*(_written(captured, program) for program in captured.programs))


def named_tensors(captured: CapturedStep, names: Collection[str]) -> set[int]:
    """The ids of the tensors that the state has as `names`."""
    return {id(tensor) for path, tensor in _tensors(captured) if name_of(path) in names}


def _written(captured: CapturedStep, program: ExportedProgram) -> set[int]:
    paths = _written_paths(program)
    return {id(tensor) for path, tensor in _tensors(captured) if path in paths}


def _paths(captured: CapturedStep, tensors: Collection[int]) -> set[str]:
    return {path for path, tensor in _tensors(captured) if id(tensor) in tensors}


def _tensors(captured: CapturedStep) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a step by path; a tensor may have several."""
    module = StepModule(captured.step)
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _written_paths(program: ExportedProgram) -> set[str]:
    """The paths of the state that a program writes in place, or in its functional form returns."""
    signature = program.graph_signature
    by_name = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    in_place = (n.name for n in written(FlatGraph(program.graph_module)) if n.op == "placeholder")
    return {*signature.buffers_to_mutate.values(), *(by_name[name] for name in in_place if name in by_name)}


def guarded_programs(captured: CapturedStep) -> CapturedStep:
    """Return a step without assertions, in whose programs the indices that are computed from floats are clamped."""

    def guarded(program: ExportedProgram) -> ExportedProgram:
        if not _needs_guards(program.graph_module):
            return program
        graph = copy.deepcopy(program.graph_module)
        clamp(_float_indices(graph))
        without_assertions(FlatGraph(graph).nodes)
        with quiet_export():
            return program._update(graph, program.graph_signature)

    inference = {name: replace(made, program=guarded(made.program)) for name, made in captured.inference.items()}
    return replace(captured, train=guarded(captured.train), inference=inference)


def _needs_guards(graph: GraphModule) -> bool:
    return any(_float_indices(graph)) or any(map(assertions_of, FlatGraph(graph).nodes))


def _float_indices(graph: GraphModule) -> Iterator[Use]:
    flat = FlatGraph(graph)
    return float_indices(flat.nodes, flat.makers, written(flat))


def _decided(
    program: ExportedProgram,
    inputs: Sequence[str],
    dynamic: Dynamic,
    changed: Collection[str],
    elsewhere: Collection[str] = (),
) -> tuple[ExportedProgram, Decided]:
    """Decide on the indices of a program, or of its functional form, which is returned in its place.

    In the functional form nothing writes into memory, and only branches and loops are regions.

    Args:
        program: the program.
        inputs: the names of its inputs.
        dynamic: the step's dimensions that vary.
        changed: the paths of the tensors that a program, `after_step`, or another step changes.
        elsewhere: those that change elsewhere than in this program.
    """
    known = names_in_program(program, inputs, dynamic)
    view = _view(program, inputs, FlatGraph(program.graph_module), known, changed)
    verdicts = verdicts_on(view)
    if not verdicts.open:
        return program, Decided(verdicts, view.inputs, known, relied=relied_bounds(view, verdicts))
    with plain_operators(), quiet_export():
        table = default_decompositions() if differentiates(program.graph_module) else {}
        program = decompose(program, table)
    known = names_in_program(program, inputs, dynamic)
    view = _view(program, inputs, FlatGraph(program.graph_module), known, changed)
    view = with_kept_state(view, _changes(program, elsewhere))
    verdicts = verdicts_on(view)
    readable = {node for node, _ in _constants(program, _written_paths(program))}
    given = {*view.inputs, *readable} - set(view.opaque)
    part = Part(program.graph_module, given, verdicts.bounds)
    return program, Decided(verdicts, view.inputs, known, part, relied_bounds(view, verdicts))


def _by_path(program: ExportedProgram, relied: Mapping[Node, Relied]) -> dict[str, Relied]:
    """What is relied on of state, by its path; the constants of a program are no state that may change."""
    signature = program.graph_signature
    paths = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    return {paths[node.name]: what for node, what in relied.items() if node.name in paths}


def _view(
    program: ExportedProgram, inputs: Sequence[str], flat: FlatGraph, known: Names, changed: Collection[str]
) -> View:
    by_name = dict(zip(program.graph_signature.user_inputs, inputs, strict=True))
    top = [n for n in program.graph.nodes if n.op == "placeholder"]
    overwritten = written(flat)
    opaque = overwritten | flat.carried
    carries = {node: carry for node, carry in flat.carries.items() if node not in overwritten}
    constants = {node: value for node, value in _constants(program, changed) if node not in opaque}
    placeholders = {node: by_name[node.name] for node in top if node.name in by_name}
    return View(flat.nodes, placeholders, ConstantBounds(constants), known, flat.makers, opaque, carries)


def _constants(program: ExportedProgram, changed: Collection[str]) -> Iterator[tuple[Node, torch.Tensor]]:
    """The placeholders of constants, and of buffers and frozen parameters that are not `changed`, with their values."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in (InputKind.CONSTANT_TENSOR, InputKind.BUFFER, InputKind.PARAMETER):
            continue
        path = str(spec.target)
        value = _value(program, path)
        frozen = spec.kind is not InputKind.PARAMETER or not value.requires_grad
        if frozen and path not in changed and isinstance(value, torch.Tensor):
            yield by_name[spec.arg.name], value


def _changes(program: ExportedProgram, elsewhere: Collection[str]) -> Iterator[tuple[Node, torch.Tensor, Node]]:
    """The placeholders of buffers that a functional program alone changes, their values, and their new values."""
    nodes = {n.name: n for n in program.graph.nodes}
    places = {path: nodes[name] for name, path in program.graph_signature.inputs_to_buffers.items()}
    for name, path in program.graph_signature.buffers_to_mutate.items():
        if path in places and path not in elsewhere:
            yield places[path], _value(program, path), nodes[name]


def _value(program: ExportedProgram, path: str) -> Any:
    """The constant, or the state, that a program has at a path."""
    return program.constants[path] if path in program.constants else program.state_dict[path]


def _early(functional: ExportedProgram, made: Decided, checks: Checks, taken: Sequence[str]) -> EarlyProgram:
    """The program that computes how far indices are out of range; it takes all inputs."""
    assert made.part is not None
    graph = distances(made.part, checks, list(made.inputs))
    left = {n.name for n in graph.graph.nodes if n.op == "placeholder"}
    signature = functional.graph_signature
    results = graph.graph.output_node().args[0]
    cut = replace(
        signature,
        input_specs=[spec for spec in signature.input_specs if spec.arg.name in left],
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results],
    )
    with quiet_export():
        program = functional._update(graph, cut)
    outer = program.module_call_graph[0].signature
    assert outer is not None
    outer.out_spec = tree_structure(tuple(results))
    return EarlyProgram(program, tuple(taken), tuple(limit.input for _, limit in checks))
