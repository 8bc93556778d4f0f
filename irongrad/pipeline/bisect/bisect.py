"""Find the first pass that changes the numbers beyond rounding."""

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
from irongrad.targets import Ability

# As a share of the largest magnitude of a result, or of the terms that it sums: far above the rounding of float64, and
# far below any other change.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Finding:
    """How a pass changed the numbers of a function.

    Attributes:
        number: the pass's position among the passes, from 1.
        name: the pass's name.
        function: the function's name.
        step: the training step, 1 or 2.
        difference: the difference from the graph before any pass, both run in float64, as a share of the largest
            magnitude of the result, or of the terms that it sums.
        error: the error of the graph in its own dtypes, as a share of the error allowed for a compiled step.
        result: the kind and name of the function's worst result, which has this difference and error.
        stats: the pass's own counts of its changes.
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
        """Whether the numbers change in float64 too."""
        return not self.difference <= TOLERANCE

    @property
    def changes_numbers(self) -> bool:
        """Whether the numbers change in float64, or round more than a compiled step is allowed to."""
        return self.changes_meaning or not self.error <= 1


class _FoundError(Exception):
    """Ends the run of the passes at the first that changes the numbers."""


def bisect(
    graph: StepGraph,
    passes: Sequence[Pass],
    targets: Sequence[str] = ("llvm-cpu",),
    timer: Timer | None = None,
    *,
    abilities: frozenset[Ability] = frozenset(),
) -> tuple[Finding, ...]:
    """Run `passes` up to the first that changes the numbers; after each pass, run every function that it changed.

    Functions run in float64, which shows a change of meaning, and in their own dtypes, which shows a loss of digits.
    They run with the state before the first step, and with the state before the second.

    Args:
        graph: the step graph before any pass.
        passes: the passes, in order.
        targets: the backends that the graph is compiled for.
        timer: measures on the targets, for passes that choose by time; None if they choose by cost tables.
        abilities: as `run_passes` takes them.

    Returns:
        A finding for every change that a pass made, in order; only the last may change the numbers.

    Raises:
        InternalError: a pass fails, or leaves a graph that is not well formed.
    """
    trials = _Trials(graph)
    found: list[Finding] = []

    def compare(number: int, record: PassRecord, function: Function) -> None:
        """Record how far a changed function is from the captured one; end the run if that is beyond rounding."""
        if record.changed:
            name, stats = record.function, dict(record.stats)
            step, place, difference, error = trials.worst(name, function.graph)
            result = function.results[place]
            where = f"{result.kind} {result.name}"
            found.append(Finding(number + 1, record.name, name, step, difference, error, where, stats))
            if found[-1].changes_numbers:
                raise _FoundError

    with suppress(_FoundError):
        run_passes(graph, passes, targets, compare, timer, abilities=abilities)
    return tuple(found)


class _Trial:
    """A captured function with the arguments of one step."""

    def __init__(self, graph: GraphModule, values: list[torch.Tensor]) -> None:
        self._values = values
        self._exact = run_in_float64(graph, values)
        self._sizes = magnitudes(graph, values, self._exact)
        self._bounds = Bounds(graph, values, self._exact)

    def measured(self, graph: GraphModule) -> list[tuple[int, float, float]]:
        """For each result of the changed function: its position, and its difference and error as in `Finding`."""
        found = differences(self._exact, run_in_float64(graph, self._values), self._sizes)
        return [(i, *both) for i, both in enumerate(zip(found, self._bounds.ratios(graph), strict=True))]


class _Trials:
    """Every function of a step with the arguments of two steps; a function that no pass changes never runs."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._first = first_step(graph)
        self._second = cache(lambda: second_step(graph, self._first))
        self._trial = cache(self._new_trial)

    def _new_trial(self, name: str, step: int) -> _Trial:
        value_of = self._first if step == 1 else self._second()
        return _Trial(self._graph.functions[name].graph, arguments(self._graph, name, value_of))

    def worst(self, name: str, graph: GraphModule) -> tuple[int, int, float, float]:
        """The step, the position of the worst result, and its difference and error."""
        found = [(step, *one) for step in (1, 2) for one in self._trial(name, step).measured(graph)]
        return max(found, key=lambda f: max(f[2] / TOLERANCE, f[3]))
