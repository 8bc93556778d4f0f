"""Cores that several entry points share: each is one function of the module, which IREE optimises and compiles once.

`train_step` and `train_steps` run the same core. Inlined into both, it would be two programs with the same kernels.
IREE 3.13.0 rejects a separate function that takes tensors: the stream dialect's verifier fails on resources of several
lifetimes. It moves values that are passed in globals behind the call, because ScheduleExecutionPass orders operations
by their operands alone. So a shared core takes and returns buffer views, as an exported function does, and scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from irongrad.graph.step_graph import StepGraph, Value
from irongrad.pipeline.assemble.function_calls import return_line
from irongrad.pipeline.assemble.interface import Interface, chain_of
from irongrad.pipeline.assemble.step_functions import call_core, core, given_to, returned_by

VIEW = "!hal.buffer_view"


@dataclass(frozen=True)
class Cores:
    """The cores of a module: private functions that run a chain of functions of the step graph on the state.

    Attributes:
        graph: the step graph.
        interface: the entry points that call them.
        accumulating: the steps of the module that accumulate gradients.
    """

    graph: StepGraph
    interface: Interface
    accumulating: tuple[StepGraph, ...] = ()

    def functions(self) -> Iterator[str]:
        """Write all cores, and for each shared core the function that its callers call."""
        for chain in self._users():
            yield from core(chain, self.graph)
            if self._is_shared(chain):
                yield from self._shared(chain)

    def call(self, chain: tuple[str, ...], values: dict[Value, str], result: str) -> Iterator[str]:
        """Call the core of `chain` on the SSA names in `values`; `results` names the values that it returns."""
        if not self._is_shared(chain):
            yield from call_core(chain, self.graph, values, result)
            return
        given, returned = given_to(chain, self.graph), returned_by(chain, self.graph)
        for i, (value, kind) in enumerate(given.items()):
            yield from _argument_of_call(f"{result}.in{i}", values[value], value, kind)
        names = ", ".join(f"{result}.in{i}" for i in range(len(given)))
        signature = f"({', '.join(_types(given))}) -> ({', '.join(_types(returned))})"
        yield f'{result}.view:{len(returned)} = func.call @"{self._name(chain)}"({names}) : {signature}'
        for i, kind in enumerate(returned.values()):
            yield f"{result}.{i} = hal.tensor.import {result}.view#{i} : {VIEW} -> {kind}"

    def results(self, chain: tuple[str, ...], result: str) -> list[str]:
        """The SSA names of the results of a `call`."""
        separator = "." if self._is_shared(chain) else "#"
        return [f"{result}{separator}{i}" for i in range(len(returned_by(chain, self.graph)))]

    def _users(self) -> Counter[tuple[str, ...]]:
        chains = (chain_of(e.name, self.graph) for e in self.interface.entry_points)
        return Counter(chain for chain in chains if chain and not parts_of(chain, self.graph))

    def _is_shared(self, chain: tuple[str, ...]) -> bool:
        return self._users()[chain] > 1

    def _name(self, chain: tuple[str, ...]) -> str:
        return f"shared.{self.graph.prefix}{'.'.join(chain)}"

    def _shared(self, chain: tuple[str, ...]) -> Iterator[str]:
        given, returned = given_to(chain, self.graph), returned_by(chain, self.graph)
        arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(_types(given)))
        types = _types(returned)
        signature = f'@"{self._name(chain)}"({arguments}) -> ({", ".join(types)})'
        yield f"  func.func private {signature} attributes {{noinline}} {{"
        values = {value: f"%t{i}" for i, value in enumerate(given)}
        for i, (value, kind) in enumerate(given.items()):
            yield f"    {_argument_in_body(f'%t{i}', f'%a{i}', value, kind)}"
        yield from (f"    {line}" for line in call_core(chain, self.graph, values, "%r"))
        for i, kind in enumerate(returned.values()):
            yield f"    %v{i} = hal.tensor.export %r#{i} : {kind} -> {VIEW}"
        yield return_line([f"%v{i}" for i in range(len(returned))], types, indent="    ")
        yield "  }"


def _is_scalar(value: Value) -> bool:
    return value.kind == "hyper"


def _types(values: dict[Value, str]) -> list[str]:
    return ["f64" if _is_scalar(v) else VIEW for v in values]


def _argument_of_call(result: str, name: str, value: Value, kind: str) -> Iterator[str]:
    if _is_scalar(value):
        yield f"{result} = tensor.extract {name}[] : {kind}"
    else:
        yield f"{result} = hal.tensor.export {name} : {kind} -> {VIEW}"


def _argument_in_body(result: str, name: str, value: Value, kind: str) -> str:
    if _is_scalar(value):
        return f"{result} = tensor.from_elements {name} : {kind}"
    return f"{result} = hal.tensor.import {name} : {VIEW} -> {kind}"


def parts_of(chain: tuple[str, ...], graph: StepGraph) -> list[str]:
    """The names of the forms of a chain's first function; empty if it takes no inputs or all its sizes are fixed."""
    if not chain or not graph.is_sized(chain[0]):
        return []
    if all(a.kind != "input" for a in graph.functions[chain[0]].arguments):
        return []
    return [graph.in_bucket(chain[0], bucket) for bucket in graph.forms]
