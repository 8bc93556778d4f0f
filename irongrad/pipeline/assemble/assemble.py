"""ImportedStep -> one IREE module: state in globals, guards, and the entry points around the functions.

The module is written as MLIR text, so that the dumped module reads like this file. For each chain of functions
of the step graph there is one private `@core.<chain>` that loads the state, calls them and stores the results;
an entry point is its guards and a call of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from iree.compiler import ir

from irongrad.graph.step_graph import StepGraph
from irongrad.mlir.walk import bytecode_of, new_context
from irongrad.pipeline.assemble.entry_points import entry_point
from irongrad.pipeline.assemble.interface import Interface, chain_of
from irongrad.pipeline.assemble.shared_step_functions import Cores, parts_of
from irongrad.pipeline.assemble.split_step_state import border_globals
from irongrad.pipeline.assemble.step_functions import declaration, part
from irongrad.pipeline.assemble.storage import Storage, symbol, tensor_type
from irongrad.pipeline.lower.importer import ImportedStep
from irongrad.runtime.errors import InternalError
from irongrad.runtime.manifest import EntryPoint


@dataclass(frozen=True)
class AssembledModule:
    """A whole program for IREE.

    Attributes:
        graph: the step graph it was made of.
        interface: its entry points.
        bytecode: the module as MLIR bytecode, the portable input of every target.
    """

    graph: StepGraph
    interface: Interface
    bytecode: bytes

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """The exported functions."""
        return self.interface.entry_points


def assemble(step: ImportedStep, interface: Interface) -> AssembledModule:
    """Put the functions, the state and the entry points into one module and verify it.

    Raises:
        InternalError: the result is no valid MLIR.
    """
    shell = "\n".join(_shell(step.graph, interface))
    with new_context() as context:
        context.allow_unregistered_dialects = False
        try:
            module = ir.Module.parse(shell)
            functions = ir.Module.parse(step.modules.linalg)
        except ir.MLIRError as error:
            raise InternalError(f"the assembled module does not parse: {error}") from error
        _replace_declarations(module, functions)
        if not module.operation.verify():
            raise InternalError("the assembled module does not verify")
        return AssembledModule(step.graph, interface, bytecode_of(module))


def _replace_declarations(module: ir.Module, functions: ir.Module) -> None:
    """Move the imported functions into `module` in place of their declarations."""
    declared = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    for function in list(functions.body.operations):
        declared[function.name.value].operation.erase()
        function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        function.detach_from_parent()
        module.body.append(function)


def _shell(graph: StepGraph, interface: Interface) -> Iterator[str]:
    """The module without its imported functions, which are only declared."""
    yield "module @irongrad {"
    yield from (f"  {line}" for line in Storage(graph).globals())
    if interface.accumulates:
        yield from _accumulators(graph)
    yield from (f"  {line}" for line in border_globals(graph))
    for name, function in graph.functions.items():
        yield from declaration(name, function)
    chains = dict.fromkeys(chain_of(e.name, graph) for e in interface.entry_points)
    for name in dict.fromkeys(name for chain in chains for name in parts_of(chain, graph)):
        yield from part(name, graph)
    cores = Cores(graph, interface)
    yield from cores.functions()
    accumulated = graph if interface.accumulates else replace(graph, gradients=())
    for entry in interface.entry_points:
        yield from entry_point(entry, accumulated, cores)
    yield "}"


def _accumulators(graph: StepGraph) -> Iterator[str]:
    for name in graph.gradients:
        kind = tensor_type(graph.tensor(name).initial)
        yield f"  util.global private mutable {symbol('accumulator', name)} = dense<0.0> : {kind}"
    yield "  util.global private mutable @accumulated = 0 : i64"
