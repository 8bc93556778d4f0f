"""Exported evaluation-mode programs as functions of state and inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch._export import utils
from torch._ops import OperatorBase
from torch.export import ExportedProgram, decomp_utils, default_decompositions, exported_program
from torch.export.graph_signature import InputKind, OutputKind

from irongrad.diagnostics import source_lines
from irongrad.graph.flat_graph import interpret_regions
from irongrad.graph.step_graph import Value
from irongrad.operators.decompositions import is_ours
from irongrad.operators.legalize.complex_numbers import at_fixed_sizes
from irongrad.operators.random import is_random
from irongrad.pipeline.capture.decompose import decompose
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.differentiate.specialise import Interpret, Program
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.dimensions import derived_of, dims_of, guards_of, named_sizes, names_in_program, symbolic_inputs
from irongrad.step.train_step import TrainStep

Table = dict[OperatorBase, Callable[..., Any]]


def inference_table(*, dynamic: bool) -> Table:
    """Return torch.export's decompositions, without those of operators that IronGrad decomposes later.

    A joint graph keeps these operators too. A random operator is not decomposed either, so it makes one draw, as in
    eager. With dynamic sizes, only composite operators are decomposed. Autograd decomposes the same ones, so a joint
    graph contains none of them.

    Args:
        dynamic: whether the step has named dimensions.
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
def _composites_listed_once() -> Iterator[None]:
    """While open, torch.export lists the composite operators of all libraries once.

    torch 2.13 lists them for each table and for each program. Each time, it looks up all of them once per library.
    """
    listed = functools.cache(utils._collect_all_valid_cia_ops)
    with (
        mock.patch.object(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops)),
        mock.patch.object(decomp_utils, "_collect_all_valid_cia_ops", listed),
        mock.patch.object(exported_program, "_collect_all_valid_cia_ops", listed),
    ):
        yield


@contextmanager
def _kernels_given_once() -> Iterator[None]:
    """While open, the kernels that `run_decompositions` gives to all composite operators stay for the next program.

    torch 2.13 gives and takes some 20 kernels for each of hundreds of operators. That takes longer than to decompose a
    small program.
    """
    override = exported_program._override_composite_implicit_decomp
    given: dict[OperatorBase, Callable[..., Any]] = {}

    with ExitStack() as stack:

        def kept(kernels: dict[OperatorBase, Callable[..., Any]]) -> AbstractContextManager[None]:
            if kernels != given:
                stack.close()
                with mock.patch.object(OperatorBase, "py_impl", _registered):
                    stack.enter_context(override(kernels))
                given.clear()
                given.update(kernels)
            return nullcontext()

        with mock.patch.object(exported_program, "_override_composite_implicit_decomp", kept):
            yield


def _registered(operator: OperatorBase, key: DispatchKey) -> Callable[[Callable[..., Any]], None]:
    """What `py_impl` does for a dispatch key without a kernel; torch 2.13's makes new type hints in each call."""

    def register(kernel: Callable[..., Any]) -> None:
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()

    return register


def decomposed(programs: Sequence[ExportedProgram], *, dynamic: bool) -> list[ExportedProgram]:
    """Decompose the operators of evaluation-mode programs, as `inference_table` says, into programs of their own.

    Args:
        programs: the programs of one step.
        dynamic: whether the step has named dimensions.
    """
    if not programs:
        return []
    with plain_operators(), source_lines.quiet_export(), _composites_listed_once():
        table = inference_table(dynamic=dynamic)
        with _kernels_given_once():
            for program in programs:
                interpret_regions(program.graph_module)
            return [decompose(program, table) for program in programs]


def inference_program(
    program: ExportedProgram,
    names: StateNames,
    step: TrainStep,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Program:
    """Turn a decomposed evaluation-mode program into a function of the state and of `inputs` that returns `outputs`.

    Raises:
        CaptureError: the program writes into an input.
    """
    symbols = names_in_program(program, inputs, step.dynamic)
    arguments, examples = _arguments(program, names, step, inputs)
    results = _results(program, names, outputs)
    portable = at_fixed_sizes(program.graph_module, symbols)

    # PyTorch's decompositions drop the cast of what a `copy_` writes into a buffer of another dtype.
    dtypes = [names.state[r.name].initial.dtype if r.kind == "state" else None for r in results]

    def run(interpret: Interpret, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        return [new if d is None else new.to(d) for new, d in zip(interpret(portable, values), dtypes, strict=True)]

    sizes = tuple(named_sizes(n.meta["val"], symbols) for n in portable.graph.output_node().args[0])
    fake_inputs = symbolic_inputs(program)
    derived = derived_of(fake_inputs, dims_of(inputs, step.dynamic), symbols)
    return Program(run, arguments, examples, results, sizes, symbols, step.dynamic, guards_of(fake_inputs), derived)


def _arguments(
    program: ExportedProgram, names: StateNames, step: TrainStep, inputs: tuple[str, ...]
) -> tuple[tuple[Value, ...], tuple[torch.Tensor, ...]]:
    """The arguments of a program, and an example of each; constants become state."""
    found: list[tuple[Value, torch.Tensor]] = []
    examples = step.examples
    remaining = iter(inputs)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            name = next(remaining)
            found.append((Value("input", name), examples[name]))
            continue
        path = str(spec.target)
        if path in names:
            name = names.of(path)
        else:
            tensor = program.constants[path] if path in program.constants else program.state_dict[path]
            name = names.constant(path, tensor)
        found.append((Value("state", name), names.state[name].initial))
    return tuple(a for a, _ in found), tuple(e for _, e in found)


def _results(program: ExportedProgram, names: StateNames, outputs: tuple[str, ...]) -> tuple[Value, ...]:
    results: list[Value] = []
    remaining = iter(outputs)
    for spec in program.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            results.append(Value("state", names.of(str(spec.target))))
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(Value("output", next(remaining)))
        else:
            raise CaptureError(f"evaluation writes into an input ({spec}); return the new value instead")
    return tuple(results)
