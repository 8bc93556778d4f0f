"""The first pass that changes the numbers beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from irongrad.passes.base import Pass
from irongrad.passes.manager import PassRecord, run_passes
from irongrad.passes.wide import largest_difference, magnitudes, run_wide, values_for
from irongrad.pipeline.graphs import Function, StepGraph, Value, base_name, specialised_name

# Of the largest magnitude of a result, or of what it is a sum of: far above what float64 rounds, far below what
# anything but rounding would do.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Finding:
    """What a pass did to the numbers of a function.

    Attributes:
        number: its position among the passes, from 1.
        name: the pass's name.
        function: the function's name.
        difference: the largest difference from the graph before any pass, run in float64, as a share of the largest
            magnitude of the result or of what it is a sum of.
        result: where that is: the kind and name of the function's result.
        stats: what the pass says it did.
    """

    number: int
    name: str
    function: str
    difference: float
    result: str
    stats: dict[str, int]

    @property
    def changes_numbers(self) -> bool:
        """Whether that is more than rounding."""
        return not self.difference <= TOLERANCE


class _FoundError(Exception):
    """Ends the run of the passes."""


def bisect(graph: StepGraph, passes: Sequence[Pass], targets: Sequence[str] = ("llvm-cpu",)) -> tuple[Finding, ...]:
    """Run `passes`, and after each run every function that it changed, up to the first that changes the numbers.

    Returns:
        A finding for every change a pass made, in order; only the last can be one that changes the numbers.

    Raises:
        InternalError: a pass fails, or leaves a graph that is not well formed.
    """
    value_of = values_for(graph)
    arguments = {name: _arguments(graph, name, value_of) for name in graph.functions}
    before = {name: run_wide(f.graph, arguments[name]) for name, f in graph.functions.items()}
    sizes = {name: magnitudes(f.graph, arguments[name], before[name]) for name, f in graph.functions.items()}
    found: list[Finding] = []

    def compare(number: int, record: PassRecord, function: Function) -> None:
        if not record.changed:
            return
        name = record.function
        place, difference = largest_difference(before[name], run_wide(function.graph, arguments[name]), sizes[name])
        result = function.results[place]
        where = f"{result.kind} {result.name}"
        found.append(Finding(number + 1, record.name, name, difference, where, dict(record.stats)))
        if found[-1].changes_numbers:
            raise _FoundError

    with suppress(_FoundError):
        run_passes(graph, passes, targets, compare)
    return tuple(found)


def _arguments(step: StepGraph, name: str, value_of: Callable[[Value], torch.Tensor]) -> list[torch.Tensor]:
    """A value for every argument of a function: of the examples as much as it takes, with zeros where it takes more."""
    function, sizes = step.functions[name], _sizes(step, name)
    values = [torch.tensor(sizes[a.name]) if a.kind == "size" else value_of(a) for a in function.arguments]
    if function.of_any_size:
        return values
    return [_fitted(v, function.example(i).shape) for i, v in enumerate(values)]


def _sizes(step: StepGraph, name: str) -> dict[str, int]:
    """The sizes of named dimensions: those of the examples, or of the function's bucket where that is smaller."""
    own = (b for b in step.buckets if specialised_name(base_name(name), b) == name)
    bucket = next(own, step.buckets[-1] if step.buckets else {})
    sizes = {dim: step.inputs[n].shape[d] for n, dims in step.dynamic.items() for d, dim in dims.items()}
    return {dim: min(size, bucket.get(dim, size)) for dim, size in sizes.items()}


def _fitted(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    part = value[tuple(slice(size) for size in shape)]
    if part.shape == shape:
        return part
    result = value.new_zeros(shape)
    result[tuple(slice(size) for size in part.shape)] = part
    return result
