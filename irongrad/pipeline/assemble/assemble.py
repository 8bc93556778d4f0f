"""ImportedStep, one or several -> one IREE module: state in globals, guards, and the entry points around the functions.

The module is written as MLIR text, so that the dumped module reads like this file. For each chain of functions
of the step graph there is one private `@core.<chain>` that loads the state, calls them and stores the results;
an entry point is its guards and a call of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from iree.compiler import ir

from irongrad.graph.over_ranks import exchanges_in
from irongrad.graph.step_graph import StepGraph
from irongrad.mlir.walk import bytecode_of, new_context
from irongrad.pipeline.assemble.entry_points import entry_point
from irongrad.pipeline.assemble.exchange import declarations
from irongrad.pipeline.assemble.interface import Interface, chain_of
from irongrad.pipeline.assemble.relied_values import refuse_other_initial_values
from irongrad.pipeline.assemble.shard_functions import shard_functions
from irongrad.pipeline.assemble.shared_step_functions import Cores, parts_of
from irongrad.pipeline.assemble.split_step_state import border_globals
from irongrad.pipeline.assemble.statistics import statistics_functions, write_exchanges
from irongrad.pipeline.assemble.step_functions import declaration, part
from irongrad.pipeline.assemble.storage import Storage, accumulated, accumulator, tensor_type
from irongrad.pipeline.lower.importer import ImportedStep
from irongrad.runtime.errors import InternalError
from irongrad.runtime.manifest import PORTABLE_MODULE, EntryPoint


@dataclass(frozen=True)
class Part:
    """One step of a module.

    Attributes:
        step: its functions as linalg.
        interface: its entry points.
    """

    step: ImportedStep
    interface: Interface


@dataclass(frozen=True)
class AssembledModule:
    """A whole program for IREE.

    Attributes:
        graphs: the step graphs that it was made of, over one state.
        interfaces: their entry points, in the same order.
        bytecode: the module as MLIR bytecode, the portable input of every target.
    """

    graphs: tuple[StepGraph, ...]
    interfaces: tuple[Interface, ...]
    bytecode: bytes

    @property
    def placement(self) -> None:
        """Where parts of the program run: nowhere else than the whole."""
        return None

    @property
    def portable(self) -> dict[str, bytes]:
        """The files of the portable module."""
        return {PORTABLE_MODULE: self.bytecode}

    @property
    def graph(self) -> StepGraph:
        """The step graph of a module with one step; one of several otherwise."""
        return self.graphs[0]

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """The exported functions."""
        return tuple(entry for interface in self.interfaces for entry in interface.entry_points)


def assemble(parts: Sequence[Part]) -> AssembledModule:
    """Put the functions of one or several steps, their state and the entry points into one module and verify it.

    Raises:
        InternalError: the result is no valid MLIR.
    """
    shell = "\n".join(_shell(parts))
    with new_context() as context:
        context.allow_unregistered_dialects = False
        try:
            module = ir.Module.parse(shell)
            functions = [ir.Module.parse(p.step.modules.linalg) for p in parts]
        except ir.MLIRError as error:
            raise InternalError(f"the assembled module does not parse: {error}") from error
        for imported, of_step in zip(functions, parts, strict=True):
            _replace_declarations(module, imported, of_step.step.graph)
        if not module.operation.verify():
            raise InternalError("the assembled module does not verify")
        graphs = tuple(p.step.graph for p in parts)
        return AssembledModule(graphs, tuple(p.interface for p in parts), bytecode_of(module))


def _replace_declarations(module: ir.Module, functions: ir.Module, graph: StepGraph) -> None:
    """Move the imported functions into `module` in place of their declarations."""
    exchanges = {f"graph.{graph.prefix}{n}": len(exchanges_in(f.graph.graph)) for n, f in graph.functions.items()}
    declared = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    for function in list(functions.body.operations):
        write_exchanges(function.operation, exchanges[function.name.value])
        declared[function.name.value].operation.erase()
        function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        function.detach_from_parent()
        module.body.append(function)


def _shell(parts: Sequence[Part]) -> Iterator[str]:
    """The module without its imported functions, which are only declared."""
    yield "module @irongrad {"
    yield from (f"  {line}" for line in Storage(parts[0].step.graph).globals())
    yield from (f"  {line}" for line in refuse_other_initial_values(parts[0].step.graph))
    if any(p.step.graph.bucket_bytes for p in parts):
        yield from (f"  {line}" for line in declarations(shards=bool(parts[0].step.graph.shards)))
        yield from (f"  {line}" for line in statistics_functions([p.step.graph for p in parts]))
    accumulating = tuple(p.step.graph for p in parts if p.interface.accumulates)
    for graph in accumulating:  # before all functions: in IREE 3.13.0 a store to a later global fails
        yield from _accumulators(graph)
    for of_step in parts:
        yield from _step(of_step.step.graph, of_step.interface, accumulating)
    yield "}"


def _step(graph: StepGraph, interface: Interface, accumulating: tuple[StepGraph, ...]) -> Iterator[str]:
    """What one step has of its own: its functions, cores and entry points."""
    yield from (f"  {line}" for line in border_globals(graph))
    for name in graph.functions:
        yield from declaration(name, graph)
    chains = dict.fromkeys(chain_of(e.name, graph) for e in interface.entry_points)
    for name in dict.fromkeys(name for chain in chains for name in parts_of(chain, graph)):
        yield from part(name, graph)
    yield from shard_functions(graph)
    cores = Cores(graph, interface, accumulating)
    yield from cores.functions()
    whole = graph if interface.accumulates else replace(graph, gradients=())
    for entry in interface.entry_points:
        yield from entry_point(entry, whole, cores)


def _accumulators(graph: StepGraph) -> Iterator[str]:
    for name in graph.gradients:
        kind = tensor_type(graph.tensor(name).initial)
        yield f"  util.global private mutable {accumulator(graph, name)} = dense<0.0> : {kind}"
    yield f"  util.global private mutable {accumulated(graph)} = 0 : i64"
