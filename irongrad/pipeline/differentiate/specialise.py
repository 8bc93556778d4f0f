"""Trace a captured program at the sizes of its examples, at the sizes of a bucket with padding, or for any size.

A bucket may leave dimensions open (`irongrad.sizes.open`): these are traced for any size, beside the padded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import Function, Value
from irongrad.operators.legalize.random_state import trace
from irongrad.padding.interpreter import interpret_padded, zeroed_in
from irongrad.padding.padded import Padding
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.differentiate.any_size import interpret_any_size
from irongrad.sizes.asked import Asked
from irongrad.sizes.buckets import Bucket, open_dimensions
from irongrad.sizes.dimensions import Names, canonical
from irongrad.sizes.expressions import Sizes, in_dimensions, unit_of
from irongrad.sizes.limits import always_holds, limits_of
from irongrad.sizes.open import closed, is_padded_size, name_of, open_sizes, opened
from irongrad.sizes.symbols import Derived, environment_of

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

    @property
    def is_sized(self) -> bool:
        """Whether an input has a named dimension."""
        return any(a.kind == "input" and self.dynamic.get(a.name) for a in self.arguments)


def specialise(program: Program, bucket: Bucket | None) -> tuple[Function, set[Any]]:
    """Trace `program` at the sizes of `bucket`, with the true sizes as further arguments.

    The dimensions that the bucket does not name stay symbols. Without a bucket, all named dimensions do, or the
    example's sizes are fixed if there are none.

    Returns:
        The function, and expressions of named dimensions that must not be negative at the sizes of a call.

    Raises:
        UnsupportedOpError: an operator cannot be padded exactly, or cannot be compiled; names the user's line.
    """
    if bucket is None:
        known = {canonical(c) for c in captured_conditions(program) if c.free_symbols}

        def plain(*values: torch.Tensor) -> list[torch.Tensor]:
            return list(program.run(partial(interpret_any_size, known=known), *values))

        dims = _dims(program, ())
        return trace(plain, program.examples, program.arguments, program.results, dims, program.derived), set()

    needs: set[Any] = set()
    sized = (*bucket, *open_dimensions(program.dynamic, bucket))

    def padded(*values: torch.Tensor) -> list[torch.Tensor]:
        operands, true = values[: -len(sized)], dict(zip(sized, values[-len(sized) :], strict=True))
        return list(program.run(padded_interpreter(program, bucket, true, needs), *operands))

    scalars = [torch.zeros((), dtype=torch.int64)] * len(sized)
    arguments = (*program.arguments, *(Value("size", name) for name in sized))
    dims = [*_dims(program, bucket), *({} for _ in sized)] if len(sized) > len(bucket) else []
    examples = [*examples_in(program, bucket), *scalars]
    return trace(padded, examples, arguments, program.results, dims, program.derived), needs


def _dims(program: Program, without: Collection[str]) -> list[Mapping[int, str]]:
    """For each argument, the names of its dimensions, except those in `without`."""
    named = [program.dynamic.get(a.name, {}) if a.kind == "input" else {} for a in program.arguments]
    return [{d: name for d, name in dims.items() if name not in without} for dims in named]


def captured_conditions(program: Program) -> list[Any]:
    """The conditions on named dimensions under which the captured graph is right."""
    return [in_dimensions(guard.xreplace(dict(program.names))) for guard in program.guards]


def padded_interpreter(
    program: Program, bucket: Bucket, true: Mapping[str, torch.Tensor], needs: set[Any] | None = None
) -> Interpret:
    """Return an interpreter that runs a graph of `program` at the sizes of `bucket`, on padded inputs.

    Args:
        program: the program.
        bucket: the sizes with padding.
        true: the sizes without padding, int64 of rank 0.
        needs: receives expressions of named dimensions that must not be negative.
    """
    names = opened(program.names, bucket)

    def interpret(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        asked = _asked(program, bucket, values)
        with plain_operators() if asked is not None else nullcontext():
            zeroed = zeroed_in(graph, values, names, padding_in(graph, values, names, bucket, true), asked)
            padding = padding_in(graph, values, names, bucket, true)
            results = interpret_padded(graph, values, names, padding, zeroed, asked)
        if needs is not None:
            needs.update(in_dimensions(closed(need)) for need in padding.needs)
        return results

    return interpret


def _asked(program: Program, bucket: Bucket, values: Sequence[torch.Tensor]) -> Asked | None:
    """The conditions that a trace asks on the sizes of open dimensions; None if no dimension is open.

    Those of the program on open dimensions alone are checked in every call. Others have to hold for all sizes that
    these allow: padded dimensions have the bucket's size in the trace, and not the size of the call.
    """
    environment = environment_of(values)
    if environment is None:
        return None
    conditions = [(c, {name_of(s) for s in c.free_symbols}) for c in captured_conditions(program)]
    known = [c for c, names in conditions if names and not names & bucket.keys()]
    limits = limits_of(known, open_dimensions(program.dynamic, bucket))
    return Asked(environment, {canonical(c) for c in known}, lambda c: always_holds(in_dimensions(c), limits))


def padding_in(
    graph: GraphModule,
    values: Sequence[torch.Tensor],
    names: Names,
    bucket: Bucket,
    true: Mapping[str, torch.Tensor],
) -> Padding:
    """Return the padding of the arguments of `graph`, which are inputs of `true` sizes at the sizes of `bucket`.

    Args:
        graph: the graph.
        values: its arguments.
        names: its symbols as expressions of named dimensions, as `opened` returns them.
        bucket: the sizes with padding.
        true: the sizes without padding.
    """
    units = {s for size in names.values() for s in size.free_symbols if unit_of(s) is not None and is_padded_size(s)}
    return Padding(Sizes(bucket, true, units, open_sizes(graph, values, names)))


def examples_in(program: Program, bucket: Bucket) -> list[torch.Tensor]:
    """Return the examples of `program`, with inputs at the sizes of `bucket`."""
    return [
        example.new_empty(padded_shape(example.shape, program.dynamic.get(a.name, {}), bucket))
        if a.kind == "input"
        else example
        for a, example in zip(program.arguments, program.examples, strict=True)
    ]


def padded_shape(shape: Sequence[int], dims: Mapping[int, str], bucket: Bucket) -> list[int]:
    """Return `shape` with the sizes of `bucket` for the dimensions that it names."""
    return [bucket.get(dims[d], size) if d in dims else size for d, size in enumerate(shape)]
