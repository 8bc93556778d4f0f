"""The private functions of the module: each loads the state, calls functions of the step graph, stores the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from irongrad.pipeline.dtypes import mlir_type
from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.storage import Storage, tensor_type
from irongrad.runtime.manifest import TensorSpec


def spec_type(spec: TensorSpec) -> str:
    """The MLIR type of an input or output."""
    return mlir_type(spec.shape, torch_dtype(spec.dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a numpy name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def declaration(name: str, function: Function) -> Iterator[str]:
    """Declare the imported function `name`."""
    arguments = ", ".join(tensor_type(function.example(i)) for i in range(len(function.arguments)))
    results = ", ".join(tensor_type(t) for t in function.results_like())
    yield f'  func.func private @"graph.{name}"({arguments}) -> ({results})'


def core(chain: tuple[str, ...], graph: StepGraph) -> Iterator[str]:
    """Load the state, call the functions of `chain`, store the new state, return the outputs."""
    given = _given(chain, graph)
    returned = returned_by(chain, graph)
    arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(given.values()))
    yield f'  func.func private @"{_core_name(chain)}"({arguments}) -> ({", ".join(returned.values())}) {{'
    storage = Storage(graph)
    values = {value: f"%a{i}" for i, value in enumerate(given)}
    new: dict[Value, str] = {}
    for position, name in enumerate(chain):
        function = graph.functions[name]
        for value, kind in _typed_arguments(function):
            if value not in values:
                result = values[value] = f"%s{len(values)}"
                if storage.is_gathered(value):
                    lines = _barred(f"{result}.free", result, kind, storage.gathered(f"{result}.free", value, values))
                else:
                    lines = storage.load(result, value, kind)
                yield from (f"    {line}" for line in lines)
        for line in call(f"graph.{name}", function, values, f"%r{position}"):
            yield f"    {line}"
        for i, (value, kind) in enumerate(_typed_results(function)):
            new[value] = values[value] = f"%r{position}#{i}"
            if value.kind == "gradient" and not storage.is_member(value):
                values[value] = f"%b{position}.{i}"
                yield from (f"    {line}" for line in _barred(new[value], values[value], kind))
    kinds = {v: k for name in chain for v, k in _typed_results(graph.functions[name])}
    for value, name in new.items():
        if value.kind in ("state", "accumulator", "pack"):
            yield from (f"    {line}" for line in storage.store(name, value, kinds[value]))
    yield return_line([new[v] for v in returned], list(returned.values()), indent="    ")
    yield "  }"


def _barred(source: str, result: str, kind: str, lines: Iterable[str] = ()) -> Iterator[str]:
    """What `lines` compute as `source`, behind a barrier.

    With --iree-opt-data-tiling, IREE 3.13.0 fuses the unpacking of a matmul into an optimizer update with several
    results and then refuses its own tile sizes ("large vector sizes").
    """
    yield from lines
    yield f"{result} = util.optimization_barrier {source} : {kind}"


def _core_name(chain: tuple[str, ...]) -> str:
    return "core." + ".".join(chain)


def _typed_arguments(function: Function) -> list[tuple[Value, str]]:
    return [(a, tensor_type(function.example(i))) for i, a in enumerate(function.arguments)]


def _typed_results(function: Function) -> list[tuple[Value, str]]:
    return list(zip(function.results, map(tensor_type, function.results_like()), strict=True))


def _given(chain: tuple[str, ...], graph: StepGraph) -> dict[Value, str]:
    """What a caller hands to the core of `chain`, with types."""
    typed = [pair for name in chain for pair in _typed_arguments(graph.functions[name])]
    return {value: kind for value, kind in typed if value.kind in ("input", "hyper", "count")}


def returned_by(chain: tuple[str, ...], graph: StepGraph) -> dict[Value, str]:
    """What the core of `chain` hands back, with types."""
    typed = [pair for name in chain for pair in _typed_results(graph.functions[name])]
    return {value: kind for value, kind in typed if value.kind == "output"}


def call(symbol: str, function: Function, values: dict[Value, str], result: str) -> Iterator[str]:
    """Call an imported function on the SSA names in `values`; its results are `result#0`, `result#1`, …."""
    arguments, results = _typed_arguments(function), _typed_results(function)
    operands = ", ".join(values[v] for v, _ in arguments)
    signature = f"({', '.join(k for _, k in arguments)}) -> ({', '.join(k for _, k in results)})"
    yield f'{result}:{len(results)} = func.call @"{symbol}"({operands}) : {signature}'


def call_core(chain: tuple[str, ...], graph: StepGraph, values: dict[Value, str], result: str) -> Iterator[str]:
    """Call the core of `chain` on the SSA names in `values`; its results are `result#0`, …."""
    given, returned = _given(chain, graph), returned_by(chain, graph)
    operands = ", ".join(values[v] for v in given)
    signature = f"({', '.join(given.values())}) -> ({', '.join(returned.values())})"
    assigned = f"{result}:{len(returned)} = " if returned else ""
    yield f'{assigned}func.call @"{_core_name(chain)}"({operands}) : {signature}'


def return_line(names: Sequence[str], kinds: Sequence[str], indent: str = "") -> str:
    """A return of `names`, which may be none."""
    return f"{indent}return {', '.join(names)} : {', '.join(kinds)}" if names else f"{indent}return"
