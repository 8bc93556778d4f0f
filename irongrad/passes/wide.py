"""Running a graph with every floating-point tensor widened to float64, to tell a change of meaning from rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target

from irongrad.pipeline.eager_control_flow import eager_control_flow
from irongrad.pipeline.graphs import StepGraph, Value
from irongrad.runtime.manifest import Role

aten = torch.ops.aten

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


def run_wide(graph: GraphModule, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a functional graph in float64, whatever floating-point dtypes it asks for."""
    with torch.no_grad(), eager_control_flow():
        return _run(graph, [widened(v) for v in values])


def _run(graph: GraphModule, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(_Wide(graph).run(*values, enable_io_processing=False))


def widened(value: Any) -> Any:
    """A narrower floating-point tensor in float64, float64 for such a dtype, anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.double()
    return torch.float64 if value in _NARROW else value


class _Wide(Interpreter):
    def fetch_attr(self, target: str) -> Any:
        """A constant, or the body of control flow as a function."""
        value = super().fetch_attr(target)
        if isinstance(value, GraphModule):
            return lambda *values: _run(value, values)
        return widened(value)

    def run_node(self, n: Node) -> Any:
        """Run one node; `view` as `reshape`, since a graph's tensors have no strides."""
        if n.target is aten.view.dtype:  # the bits of a number are those of its own dtype
            (source,) = n.all_input_nodes
            narrow = self.env[source].to(source.meta["val"].dtype)
            return widened(aten.view.dtype(narrow, n.args[1]))
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; where it takes a dtype, with float64 for a narrower one."""
        if target is aten.view.default:
            target = aten.reshape.default
        args = tuple(widened(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: widened(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def values_for(step: StepGraph) -> Callable[[Value], torch.Tensor]:
    """A value for every argument of the functions of `step`, the same one whenever it is asked for.

    Model state and inputs are the step's own. Optimizer state, which begins as zeros that would hide a factor, and
    gradients are random; nonnegative, since second moments are. What one piece of a step saves is what it computes.
    """
    known: dict[Value, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def random_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    def make(value: Value) -> torch.Tensor:
        match value.kind:
            case "input":
                return step.inputs[value.name]
            case "hyper":
                return torch.tensor(step.hypers[value.name], dtype=torch.float64)
            case "count":
                return torch.tensor(3.0, dtype=torch.float64)
            case "gradient" | "accumulator":
                return random_like(step.tensor(value.name).initial)
            case "saved":
                forward = step.functions["forward"]
                results = run_wide(forward.graph, [value_of(a) for a in forward.arguments])
                known.update(zip(forward.results, results, strict=True))
                return known[value]
        tensor = step.tensor(value.name)
        random = tensor.role is Role.OPTIMIZER and tensor.initial.is_floating_point()
        return random_like(tensor.initial) if random else tensor.initial

    def value_of(value: Value) -> torch.Tensor:
        if value not in known:
            known[value] = make(value)
        return known[value]

    return value_of


def largest_difference(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[int, float]:
    """The result that differs most, by its position, and by how much of its largest finite magnitude.

    Infinite where one is not finite and the other is, or has another infinity.
    """
    differences = [_difference(b, a) for b, a in zip(before, after, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__, default=0)
    return worst, differences[worst] if differences else 0.0


def _difference(before: torch.Tensor, after: torch.Tensor) -> float:
    b, a = before.double(), after.double()
    finite = b.isfinite() & a.isfinite()
    if not torch.equal(b[~finite].nan_to_num(), a[~finite].nan_to_num()) or (b.isnan() != a.isnan()).any():
        return float("inf")
    scale = b[finite].abs().amax().item() if finite.any() else 0.0
    gap = (b[finite] - a[finite]).abs().amax().item() if finite.any() else 0.0
    return gap / scale if scale else gap
