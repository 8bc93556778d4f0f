"""Exported programs of evaluation mode as functions of state and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import OperatorBase
from torch.export import ExportedProgram, default_decompositions, exported_program
from torch.export.graph_signature import InputKind, OutputKind

from irongrad.diagnostics import source_lines
from irongrad.graph.flat_graph import interpret_regions
from irongrad.graph.step_graph import Value
from irongrad.operators.decompositions import is_ours
from irongrad.operators.legalize.complex_numbers import at_fixed_sizes
from irongrad.operators.random import is_random
from irongrad.pipeline.capture.capture import plain_operators
from irongrad.pipeline.differentiate.specialise import Interpret, Program
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.dimensions import derived_of, dims_of, guards_of, named_sizes, names_in_program, symbolic_inputs
from irongrad.step.train_step import TrainStep

Table = dict[OperatorBase, Callable[..., Any]]


def inference_table(*, dynamic: bool) -> Table:
    """torch.export's decompositions without operators that are decomposed here later, as in the joint graph.

    A random operator too is left as it is, so that it makes one draw, as in eager. With dynamic sizes there are those
    alone that autograd takes apart too, so that a joint graph has none of them.
    """
    composite = DispatchKey.CompositeImplicitAutograd
    with plain_operators(), source_lines.quiet_export():
        return {
            operator: decomposition
            for operator, decomposition in default_decompositions().items()
            if not is_random(operator) and not is_ours(operator)
            and (not dynamic or operator.has_kernel_for_dispatch_key(composite))
        }  # fmt: skip


@contextmanager
def composites_within_autocast(table: Table) -> Iterator[None]:
    """Have `run_decompositions` take composite operators apart where autocast still sees what they are made of.

    torch 2.13 does so below the dispatch keys of autograd and autocast, where the product in an einsum keeps the dtypes
    that it is given. In eager, and in a joint graph, that product runs in half precision.
    """

    def kernel(operator: OperatorBase, *, deferred_error: bool) -> Callable[..., Any]:
        return table[operator] if operator in table else autograd_not_implemented(operator, deferred_error)

    with mock.patch.object(exported_program, "autograd_not_implemented", kernel):
        yield


def inference_program(
    program: ExportedProgram,
    names: StateNames,
    step: TrainStep,
    table: Table,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Program:
    """A program of evaluation mode, as functions of the state and of `inputs`, that gives `outputs`.

    Raises:
        CaptureError: it writes into an input.
    """
    interpret_regions(program.graph_module)
    with plain_operators(), source_lines.quiet_export(), composites_within_autocast(table):
        program = program.run_decompositions(table)
    symbols = names_in_program(program, inputs, step.dynamic)
    arguments: list[Value] = []
    examples: list[torch.Tensor] = []
    remaining = list(inputs)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(Value("input", remaining.pop(0)))
            examples.append(step.inputs[arguments[-1].name])
            continue
        path = str(spec.target)
        if path in names:
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
    portable = at_fixed_sizes(program.graph_module, symbols)

    def run(interpret: Interpret, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        return interpret(portable, values)

    sizes = tuple(named_sizes(n.meta["val"], symbols) for n in portable.graph.output_node().args[0])
    given = symbolic_inputs(program)
    derived = derived_of(given, dims_of(inputs, step.dynamic), symbols)
    return Program(
        run, tuple(arguments), tuple(examples), tuple(results), sizes, symbols, step.dynamic, guards_of(given), derived
    )
