"""Range checks as functions of the step graph: `check.<name>` for every function that takes indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.ranges import Range
from irongrad.pipeline.retrace import retrace
from irongrad.pipeline.symbols import Dims


def add_guards(graph: StepGraph, ranges: Sequence[Range]) -> StepGraph:
    """Add a function `check.<name>` that returns one true or false for each range that `<name>` relies on.

    The result's name is the message for a false.
    """
    checks: dict[str, Function] = {}
    for name, function in graph.functions.items():
        taken = {a.name for a in function.arguments if a.kind == "input"}
        if mine := [r for r in ranges if r.input in taken]:
            examples = [_example(graph, function, r.input) for r in mine]
            dims = [graph.dynamic.get(r.input, {}) for r in mine] if function.of_any_size else []
            checks[f"check.{name}"] = _check(mine, examples, dims)
    return replace(graph, functions={**graph.functions, **checks})


def message(limit: Range) -> str:
    """What is said when an input leaves its range."""
    exempt = f" (or {limit.exempt})" if limit.exempt is not None else ""
    return f"{limit.input}: every value must be in [{limit.minimum}, {limit.maximum}]{exempt}; the step was not run"


def _example(graph: StepGraph, function: Function, name: str) -> torch.Tensor:
    """An input as an entry point hands it on: a whole batch, at the sizes of the function's bucket."""
    if not graph.buckets or function.of_any_size:
        return graph.inputs[name]
    return function.example(function.arguments.index(Value("input", name)))


def _check(ranges: Sequence[Range], examples: Sequence[torch.Tensor], dims: Sequence[Dims]) -> Function:
    def check(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [_inside(t, r) for t, r in zip(tensors, ranges, strict=True)]

    arguments = tuple(Value("input", r.input) for r in ranges)
    results = tuple(Value("output", message(r)) for r in ranges)
    return Function(retrace(check, examples, dims=dims), arguments, results)


def _inside(tensor: torch.Tensor, limit: Range) -> torch.Tensor:
    wrong = (tensor < limit.minimum) | (tensor > limit.maximum)
    if limit.exempt is not None:
        wrong = wrong & (tensor != limit.exempt)
    return wrong.to(torch.int64).sum() == 0
