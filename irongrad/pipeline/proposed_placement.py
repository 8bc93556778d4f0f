"""Propose which modules of a model to place on which target, by the cost model and the memory model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.interface import describe
from irongrad.pipeline.backend import optimised_function
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.memory_report import memory_of, usages_of
from irongrad.pipeline.place.parts import AND, check_parts, parts_of
from irongrad.pipeline.place.placed_modules import without_loops
from irongrad.pipeline.place.placed_step import PlacedPart, placed
from irongrad.pipeline.place.units import Division, Units, divisions, units_of
from irongrad.runtime.byte_sizes import bytes_in, readable
from irongrad.runtime.errors import UserError
from irongrad.step.train_step import TrainStep
from irongrad.targets import parse_target

# The bytes a second between two devices, through the memory of the host.
_BANDWIDTH = 5e9


@dataclass(frozen=True)
class ProposedPart:
    """A part of a proposed placement.

    Attributes:
        paths: the paths of its modules.
        target: its target.
        share: its share of the cost of a step, from 0 to 1.
        state: the bytes of its parameters, optimizer state and accumulated gradients.
        transients: the most bytes of intermediate values at a time, of any segment.
        passed: the bytes of values that it keeps between its segments or passes to other parts in a step.
    """

    paths: tuple[str, ...]
    target: str
    share: float
    state: int
    transients: int
    passed: int

    @property
    def memory(self) -> int:
        """The most bytes that it takes."""
        return self.state + self.transients + self.passed


@dataclass(frozen=True)
class Proposal:
    """A placement of a step.

    Attributes:
        parts: the parts, in the order of the forward.
        crossing: the bytes that parts pass to others in a step.
    """

    parts: tuple[ProposedPart, ...]
    crossing: int

    @property
    def place(self) -> dict[str, str]:
        """The placement as `irongrad.compile` takes it."""
        return {AND.join(part.paths): part.target for part in self.parts}


def propose_placement(
    step: TrainStep, targets: Sequence[str], *, memory: Sequence[str] = (), speed: Sequence[float] = ()
) -> Proposal:
    """Divide the modules of a model among targets, in the order of its forward.

    Of all divisions that fit into the memory, this is the one whose slowest part is the fastest, with the time to pass
    values between the parts added.

    Args:
        step: the training step.
        targets: the target of each part, the one that begins the forward first.
        memory: the memory of each target, such as `512MiB`; without limits if it is empty.
        speed: how fast each target is, compared with the others; all alike if it is empty.

    Raises:
        UserError: there are fewer modules than targets, or no division fits into the memory.
    """
    limits = _limits(targets, memory)
    speeds = list(speed) or [1.0] * len(targets)
    if len(targets) < 2 or len(speeds) != len(targets) or min(speeds) <= 0:
        raise UserError("give at least two targets, and a speed above zero for each or for none")
    graph = step_graph(step)
    units = units_of(graph, step.model, parse_target(targets[0]), len(targets))
    if len(units.paths) < len(targets):
        raise UserError(f"the model has {len(units.paths)} modules to divide, and there are {len(targets)} targets")
    ordered = sorted(divisions(units, len(targets)), key=lambda d: _seconds(d, speeds))
    found: list[Proposal] = []
    for division in ordered:
        if any(size > limit for size, limit in zip(division.state, limits, strict=True)):
            continue
        proposal = _proposed(step, graph, units, division, targets)
        if all(part.memory <= limit for part, limit in zip(proposal.parts, limits, strict=True)):
            return proposal
        found.append(proposal)
    raise UserError(_nothing_fits(found, ordered, targets))


def _limits(targets: Sequence[str], memory: Sequence[str]) -> list[float]:
    if memory and len(memory) != len(targets):
        raise UserError(f"there are {len(targets)} targets: give the memory of each, or of none")
    return [float(bytes_in(text, 0)) for text in memory] or [float("inf")] * len(targets)


def _seconds(division: Division, speeds: Sequence[float]) -> float:
    slowest = max(seconds / speed for seconds, speed in zip(division.costs, speeds, strict=True))
    return slowest + division.passed / _BANDWIDTH


def _proposed(step: TrainStep, graph: StepGraph, units: Units, division: Division, targets: Sequence[str]) -> Proposal:
    """Cut the step as a compilation would, and predict the memory of each part."""
    groups = [units.paths[start:end] for start, end in pairwise(division.bounds)]
    parts = parts_of({AND.join(paths): target for paths, target in zip(groups, targets, strict=True)})
    check_parts(parts, step)
    cut = placed(graph, without_loops(describe(graph, None)), parts)
    total = sum(division.costs)
    made = tuple(
        ProposedPart(
            part.part.paths,
            part.part.asked,
            seconds / total,
            state,
            _transients(part),
            _kept(part),
        )
        for part, seconds, state in zip(cut.parts, division.costs, division.state, strict=True)
    )
    return Proposal(made, division.passed)


def _transients(part: PlacedPart) -> int:
    """The most bytes of intermediate values of any segment, after the passes of the default level."""
    graph, _ = optimised_function(part.graph, part.part.target)
    usages = usages_of(graph, [part.part.target.backend])
    return max(memory_of(graph, part.interface, usages).predicted.values(), default=0)


def _kept(part: PlacedPart) -> int:
    """The bytes of the values that the segments of a training step give."""
    given = [
        value
        for name, function in part.graph.functions.items()
        if name.startswith("train_step.")
        for result, value in zip(function.results, function.results_like(), strict=True)
        if result.kind == "output"
    ]
    return sum(value.numel() * value.element_size() for value in given)


def _nothing_fits(found: Sequence[Proposal], ordered: Sequence[Division], targets: Sequence[str]) -> str:
    if not found:
        least = min(ordered, key=lambda d: max(d.state))
        sizes = ", ".join(f"{readable(size)} on {target}" for size, target in zip(least.state, targets, strict=True))
    else:
        best = min(found, key=lambda p: max(part.memory for part in p.parts))
        sizes = ", ".join(f"{readable(part.memory)} on {part.target}" for part in best.parts)
    return f"no division of the model fits into this memory; the one with the smallest parts takes {sizes}"
