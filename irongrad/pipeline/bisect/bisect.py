"""The first pass that changes the numbers beyond rounding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch.fx import GraphModule

from irongrad.graph.float64_runs import differences, magnitudes, run_in_float64
from irongrad.graph.step_graph import Function, StepGraph
from irongrad.passes.base import Pass, Timer
from irongrad.passes.manager import PassRecord, run_passes
from irongrad.pipeline.bisect.rounding_bounds import Bounds
from irongrad.pipeline.bisect.run_arguments import arguments, first_step, second_step

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
        step: in which training step, 1 or 2.
        difference: the difference from the graph before any pass, run in float64, as a share of the largest magnitude
            of the result or of what it is a sum of.
        error: the error of the graph in its own dtypes, as a share of what is allowed of a compiled step.
        result: where that is, the worst of the function's results: its kind and name.
        stats: what the pass says it did.
    """

    number: int
    name: str
    function: str
    step: int
    difference: float
    error: float
    result: str
    stats: dict[str, int]

    @property
    def changes_meaning(self) -> bool:
        """Whether the numbers are others in float64 too."""
        return not self.difference <= TOLERANCE

    @property
    def changes_numbers(self) -> bool:
        """Whether that is more than rounding, or rounds more than the step itself does."""
        return self.changes_meaning or not self.error <= 1


class _FoundError(Exception):
    """Ends the run of the passes."""


def bisect(
    graph: StepGraph, passes: Sequence[Pass], targets: Sequence[str] = ("llvm-cpu",), timer: Timer | None = None
) -> tuple[Finding, ...]:
    """Run `passes`, and after each run every function that it changed, up to the first that changes the numbers.

    Functions are run in float64, where a change of meaning shows, and in their own dtypes, where a loss of digits does;
    with the state as it is before the first step and before the second.

    Returns:
        A finding for every change a pass made, in order; only the last can be one that changes the numbers.

    Raises:
        InternalError: a pass fails, or leaves a graph that is not well formed.
    """
    trials = _Trials(graph)
    found: list[Finding] = []

    def compare(number: int, record: PassRecord, function: Function) -> None:
        """Note how far what a pass has changed is from what was captured; end the run where that is beyond rounding."""
        if record.changed:
            name, stats = record.function, dict(record.stats)
            step, place, difference, error = trials.worst(name, function.graph)
            result = function.results[place]
            where = f"{result.kind} {result.name}"
            found.append(Finding(number + 1, record.name, name, step, difference, error, where, stats))
            if found[-1].changes_numbers:
                raise _FoundError

    with suppress(_FoundError):
        run_passes(graph, passes, targets, compare, timer)
    return tuple(found)


class _Trial:
    """A function as it was captured, on the arguments of one step."""

    def __init__(self, graph: GraphModule, values: list[torch.Tensor]) -> None:
        self._values = values
        self._exact = run_in_float64(graph, values)
        self._sizes = magnitudes(graph, values, self._exact)
        self._bounds = Bounds(graph, values, self._exact)

    def measured(self, graph: GraphModule) -> list[tuple[int, float, float]]:
        """By result of the function as it is now: its place, its difference and its error, as in `Finding`."""
        found = differences(self._exact, run_in_float64(graph, self._values), self._sizes)
        return [(i, *both) for i, both in enumerate(zip(found, self._bounds.ratios(graph), strict=True))]


class _Trials:
    """Every function of a step, run in two steps; one that no pass changes is never run."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._first = first_step(graph)
        self._second = cache(lambda: second_step(graph, self._first))
        self._trial = cache(self._made)

    def _made(self, name: str, step: int) -> _Trial:
        value_of = self._first if step == 1 else self._second()
        return _Trial(self._graph.functions[name].graph, arguments(self._graph, name, value_of))

    def worst(self, name: str, graph: GraphModule) -> tuple[int, int, float, float]:
        """The step, the place of the result, the difference and the error where those are largest."""
        found = [(step, *one) for step in (1, 2) for one in self._trial(name, step).measured(graph)]
        return max(found, key=lambda f: max(f[2] / TOLERANCE, f[3]))
