"""Trace a captured program at the sizes of its examples, at the sizes of a bucket with padding, or for any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import Function, Value
from irongrad.operators.legalize.random_state import trace
from irongrad.padding.interpreter import interpret_padded, zeroed_in
from irongrad.padding.padded import Padding
from irongrad.pipeline.differentiate.any_size import interpret_any_size
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.dimensions import Names
from irongrad.sizes.expressions import Sizes, in_dimensions, unit_of
from irongrad.sizes.symbols import Derived

Interpret = Callable[[GraphModule, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """A function that is not traced yet.

    Attributes:
        run: takes an interpreter for the graph and the arguments, and returns the results.
        arguments: what each argument stands for.
        examples: an example of each argument.
        results: what each result stands for.
        sizes: the sizes of each result, as numbers and expressions of named dimensions.
        names: the symbols in the graph, as expressions of named dimensions; empty if all sizes are fixed.
        dynamic: names of dimensions, by the input's name and the dimension's position.
        guards: conditions on the symbols under which the graph is right.
        derived: sizes that are expressions of other dimensions, by the dimension's name.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    arguments: tuple[Value, ...]
    examples: tuple[torch.Tensor, ...]
    results: tuple[Value, ...]
    sizes: tuple[tuple[Any, ...], ...]
    names: Names
    dynamic: Mapping[str, Mapping[int, str]]
    guards: tuple[Any, ...] = ()
    derived: Derived = field(default_factory=dict)


def specialise(program: Program, bucket: Bucket | None) -> tuple[Function, set[Any]]:
    """Trace `program` at the sizes of `bucket`, with the true sizes as further arguments.

    Without a bucket, the named dimensions stay symbols, or the example's sizes are fixed if there are none.

    Returns:
        The function, and expressions of named dimensions that must not be negative at the sizes of a call.

    Raises:
        UnsupportedOpError: an operator cannot be padded exactly, or cannot be compiled; names the user's line.
    """
    if bucket is None:
        asked = [in_dimensions(guard.xreplace(dict(program.names))) for guard in program.guards]
        known = {condition.canonical for condition in asked if condition.free_symbols}

        def plain(*values: torch.Tensor) -> list[torch.Tensor]:
            return list(program.run(partial(interpret_any_size, known=known), *values))

        dims = [program.dynamic.get(a.name, {}) if a.kind == "input" else {} for a in program.arguments]
        return trace(plain, program.examples, program.arguments, program.results, dims, program.derived), set()

    needs: set[Any] = set()

    def padded(*values: torch.Tensor) -> list[torch.Tensor]:
        operands, true = values[: -len(bucket)], values[-len(bucket) :]
        return list(program.run(padded_interpreter(program.names, bucket, true, needs), *operands))

    scalars = [torch.zeros((), dtype=torch.int64)] * len(bucket)
    arguments = (*program.arguments, *(Value("size", name) for name in bucket))
    return trace(padded, [*examples_in(program, bucket), *scalars], arguments, program.results), needs


def padded_interpreter(
    names: Names, bucket: Bucket, true: Sequence[torch.Tensor], needs: set[Any] | None = None
) -> Interpret:
    """Return an interpreter that runs a graph at the sizes of `bucket`, on padded inputs.

    Args:
        names: the symbols in the graph, as expressions of named dimensions.
        bucket: the sizes with padding.
        true: the sizes without padding, int64 of rank 0, in the order of `bucket`.
        needs: receives expressions of named dimensions that must not be negative.
    """

    def interpret(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        zeroed = zeroed_in(graph, values, names, padding_in(names, bucket, true))
        padding = padding_in(names, bucket, true)
        results = interpret_padded(graph, values, names, padding, zeroed)
        if needs is not None:
            needs.update(map(in_dimensions, padding.needs))
        return results

    return interpret


def padding_in(names: Names, bucket: Bucket, true: Sequence[torch.Tensor]) -> Padding:
    """Return the padding of inputs of `true` sizes (in the order of `bucket`) at the sizes of `bucket`."""
    units = {s for size in names.values() for s in size.free_symbols if unit_of(s) is not None}
    return Padding(Sizes(bucket, dict(zip(bucket, true, strict=True)), units))


def examples_in(program: Program, bucket: Bucket) -> list[torch.Tensor]:
    """Return the examples of `program`, with inputs at the sizes of `bucket`."""
    return [
        example.new_empty(padded_shape(example.shape, program.dynamic.get(a.name, {}), bucket))
        if a.kind == "input"
        else example
        for a, example in zip(program.arguments, program.examples, strict=True)
    ]


def padded_shape(shape: Sequence[int], dims: Mapping[int, str], bucket: Bucket) -> list[int]:
    """Return `shape` with the sizes of `bucket` for its named dimensions."""
    return [bucket[dims[d]] if d in dims else size for d, size in enumerate(shape)]
