"""Arguments for runs of the functions of a step graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from irongrad.graph.float64_runs import run_in_float64
from irongrad.graph.step_graph import Function, StepGraph, Value, base_name, sizes_like, specialised_name
from irongrad.runtime.manifest import Role

# The functions that a training step runs, in order.
_STEP_FUNCTIONS = ("joint", "forward", "finish", "update", "step")

ValueOf = Callable[[Value], torch.Tensor]


def arguments(step: StepGraph, name: str, value_of: ValueOf) -> list[torch.Tensor]:
    """Return a value for every argument of the function `name`, in the argument's dtype and shape.

    A value that is too large is cut, and one that is too small is padded with zeros.
    """
    function, sizes = step.functions[name], _sizes(step, name)
    values = [torch.tensor(sizes[a.name]) if a.kind == "size" else value_of(a) for a in function.arguments]
    return [_fitted(function, i, v) for i, v in enumerate(values)]


def _fitted(function: Function, place: int, value: torch.Tensor) -> torch.Tensor:
    like = function.example(place)
    value = value.to(like.dtype)
    shape = sizes_like(value, like)
    if list(value.shape) == shape:
        return value
    result = value.new_zeros(shape)
    part = value[tuple(slice(size) for size in shape)]
    result[tuple(slice(size) for size in part.shape)] = part
    return result


def _sizes(step: StepGraph, name: str) -> dict[str, int]:
    """The sizes of named dimensions: the smaller of the example's size and the size of the function's bucket."""
    own = (b for b in step.buckets if specialised_name(base_name(name), b) == name)
    bucket = next(own, step.buckets[-1] if step.buckets else {})
    sizes = {dim: step.inputs[n].shape[d] for n, dims in step.dynamic.items() for d, dim in dims.items()}
    return {dim: min(size, bucket.get(dim, size)) for dim, size in sizes.items()}


def first_step(step: StepGraph) -> ValueOf:
    """Return a function that gives each argument of the functions of `step` a value, the same in every call.

    Model state and inputs are the step's own. Optimizer state starts as zeros, which would hide a factor, so it is
    random. Gradients are random too. Random values are nonnegative, because second moments are.
    """
    generator = torch.Generator().manual_seed(0)

    def random_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    def make(value: Value) -> torch.Tensor:
        if value.kind in ("gradient", "accumulator"):
            return random_like(step.tensor(value.name).initial)
        if value.kind != "state":
            return _example_of(step, value)
        tensor = step.tensor(value.name)
        random = tensor.role is Role.OPTIMIZER and tensor.initial.is_floating_point()
        return random_like(tensor.initial) if random else tensor.initial

    return _cached(step, make)


def second_step(step: StepGraph, first: ValueOf) -> ValueOf:
    """Return a function like that of `first_step`, but with the state after one step from the initial state."""
    known: dict[Value, torch.Tensor] = {}

    def before(value: Value) -> torch.Tensor:
        if value in known:
            return known[value]
        return step.tensor(value.name).initial if value.kind == "state" else first(value)

    for name in _STEP_FUNCTIONS:
        if name in step.functions:
            function = step.functions[name]
            results = run_in_float64(function.graph, arguments(step, name, before))
            known.update(zip(function.results, results, strict=True))
    return _cached(step, before)


def _example_of(step: StepGraph, value: Value) -> torch.Tensor:
    """The value of a hyperparameter, a count or an input."""
    match value.kind:
        case "hyper":
            return torch.tensor(step.hypers[value.name], dtype=torch.float64)
        case "count":
            return torch.tensor(3.0, dtype=torch.float64)
    return step.inputs[value.name]


def _cached(step: StepGraph, make: ValueOf) -> ValueOf:
    """`make`, called once for each value; a value that `forward` saves comes from a run of `forward`."""
    memo: dict[Value, torch.Tensor] = {}

    def value_of(value: Value) -> torch.Tensor:
        if value not in memo and value.kind == "saved":
            forward = step.functions["forward"]
            results = run_in_float64(forward.graph, arguments(step, "forward", value_of))
            memo.update((v, r) for v, r in zip(forward.results, results, strict=True) if v.kind == "saved")
        elif value not in memo:
            memo[value] = make(value)
        return memo[value]

    return value_of
