"""Range checks as functions of the step graph: `check.<name>` for every function that takes indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from irongrad.graph.step_graph import Function, Range, StepGraph, Value
from irongrad.operators.legalize.retrace import retrace
from irongrad.sizes.symbols import Dims


def add_guards(graph: StepGraph, ranges: Sequence[Range]) -> StepGraph:
    """Add a function `check.<name>` that measures the values of each input whose range `<name>` relies on.

    Its results have the inputs' names. `irongrad.pipeline.assemble.refusal_messages` refuses a result out of range.
    """
    checks: dict[str, Function] = {}
    for name, function in graph.functions.items():
        taken = {a.name for a in function.arguments if a.kind == "input"}
        if mine := [r for r in ranges if r.input in taken]:
            examples = [_example(graph, function, r.input) for r in mine]
            dims = [graph.dynamic.get(r.input, {}) for r in mine] if function.of_any_size else []
            checks[f"check.{name}"] = _check(mine, examples, dims)
    limits = {r.input: r.limits for r in ranges if r.limits}
    return replace(graph, functions={**graph.functions, **checks}, value_limits=limits)


def _example(graph: StepGraph, function: Function, name: str) -> torch.Tensor:
    """An input as an entry point passes it on: a whole batch, at the sizes of the function's bucket."""
    if not graph.buckets or function.of_any_size:
        return graph.inputs[name]
    return function.example(function.arguments.index(Value("input", name)))


def _check(ranges: Sequence[Range], examples: Sequence[torch.Tensor], dims: Sequence[Dims]) -> Function:
    def check(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [most_out_of_range(t, r) for t, r in zip(tensors, ranges, strict=True)]

    arguments = tuple(Value("input", r.input) for r in ranges)
    results = tuple(Value("output", r.input) for r in ranges)
    return Function(retrace(check, examples, dims=dims), arguments, results)


def most_out_of_range(tensor: torch.Tensor, limit: Range) -> torch.Tensor:
    """Return the distance of the index furthest from the lower bound; if any index is out of range, this one is.

    As an unsigned number, the distance of an index below the bound is larger than all others. So one maximum finds an
    index that is too small or too large. With the sign bit flipped, signed numbers have the order of unsigned ones.
    torch-mlir reduces one dimension after the other, each in its own kernel, so the tensor is flattened.

    Args:
        tensor: the indices, of any integer dtype and shape.
        limit: the range of the indices.

    Returns:
        The distance, int64 of rank 0; zero if there are no indices.
    """
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return torch.zeros((), dtype=torch.int64)
    values = tensor.reshape(-1)  # before the arithmetic, because IREE does not fuse across a reshape in between
    distance = values.to(torch.int64) - limit.minimum
    if limit.exempt is not None:
        distance = torch.where(values == limit.exempt, 0, distance)
    sign = torch.full((), torch.iinfo(torch.int64).min)
    return (distance ^ sign).amax() ^ sign
