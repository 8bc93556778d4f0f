"""Calls of the step graph's functions, as lines of MLIR."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from irongrad.graph.step_graph import Function, Value
from irongrad.pipeline.assemble.storage import tensor_type


def typed_arguments(function: Function) -> list[tuple[Value, str]]:
    """The arguments of a function with their MLIR types."""
    return [(a, tensor_type(function.example(i))) for i, a in enumerate(function.arguments)]


def typed_results(function: Function) -> list[tuple[Value, str]]:
    """The results of a function with their MLIR types."""
    return list(zip(function.results, map(tensor_type, function.results_like()), strict=True))


def call(symbol: str, function: Function, values: dict[Value, str], result: str) -> Iterator[str]:
    """Call an imported function on the SSA names in `values`; its results are `result#0`, `result#1`, …."""
    arguments, results = typed_arguments(function), typed_results(function)
    operands = ", ".join(values[v] for v, _ in arguments)
    signature = f"({', '.join(k for _, k in arguments)}) -> ({', '.join(k for _, k in results)})"
    yield f'{result}:{len(results)} = func.call @"{symbol}"({operands}) : {signature}'


def return_line(names: Sequence[str], kinds: Sequence[str], indent: str = "") -> str:
    """A return of the values `names`, of types `kinds`; both may be empty."""
    return f"{indent}return {', '.join(names)} : {', '.join(kinds)}" if names else f"{indent}return"
