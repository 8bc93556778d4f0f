"""StepGraph -> PlacedStep: a step graph for each part, and for each entry point the segments that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from irongrad.graph.dtypes import numpy_name
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.pipeline.assemble.interface import SUMMARIES, Interface, chain_of
from irongrad.pipeline.place.chains import chained
from irongrad.pipeline.place.owners import Ownership
from irongrad.pipeline.place.parts import Part
from irongrad.pipeline.place.segments import Segment, segments_of
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import (
    COUNT,
    OF_GRADIENTS,
    OF_STATE,
    PASSED,
    Call,
    EntryPoint,
    PartSpec,
    PlacementSpec,
    StateSpec,
    TensorSpec,
    of_entry,
)

# The entry points that a placed artifact has for the whole state; each part has them for its own.
_OF_PART = (*OF_STATE, *OF_GRADIENTS, "reset")
_STEPS = TensorSpec("steps", "int64", ())


@dataclass(frozen=True)
class PlacedPart:
    """A part with its own step graph.

    Attributes:
        part: the part.
        graph: the functions of its segments, over the state that it holds.
        interface: its entry points: its segments, and those of its state.
    """

    part: Part
    graph: StepGraph
    interface: Interface


@dataclass(frozen=True)
class PlacedStep:
    """A step cut into parts.

    Attributes:
        parts: the parts.
        placement: the parts and the calls of each entry point, for the manifest.
    """

    parts: tuple[PlacedPart, ...]
    placement: PlacementSpec


def placed(graph: StepGraph, interface: Interface, parts: Sequence[Part]) -> PlacedStep:
    """Cut every entry point of a step into segments for `parts`.

    Args:
        graph: the step graph, before any pass.
        interface: its entry points, without those that loop.
        parts: the parts.

    Raises:
        UserError: a part has no operators.
    """
    ownership = Ownership(parts, graph)
    chains = {e.name: chain for e in interface.entry_points if (chain := chain_of(e.name, graph))}
    for chain in chains.values():  # what a function decides on must hold in all
        ownership.of(chained(chain, graph))
    holders = {t.name: _holders(ownership.holder(t), len(parts)) for t in graph.state}
    cut: dict[str, list[Segment]] = {}
    used: set[int] = set()
    for name, chain in chains.items():
        function = chained(chain, graph)
        owners = ownership.of(function)
        used |= {number for node, number in owners.items() if node.op == "call_function"}
        cut[name] = segments_of(function, owners, holders)
    for number, part in enumerate(parts):
        if number not in used:
            raise UserError(f"place has a part {part.name!r} that computes nothing in this step: leave it out")
    makers = [_PartMaker(number, part, graph, holders) for number, part in enumerate(parts)]
    programs: dict[str, tuple[Call, ...]] = {}
    for entry in interface.entry_points:
        if entry.name in cut:
            check = graph.functions.get(f"check.{chains[entry.name][0]}")
            programs[entry.name] = tuple(
                makers[segment.part].add(number, segment, entry, check if number == 0 else None)
                for number, segment in enumerate(cut[entry.name])
            )
    made = tuple(maker.made(interface) for maker in makers)
    specs = tuple(
        PartSpec(p.part.name, p.part.target.name, tuple(s.name for s in p.interface.state), p.graph.gradients)
        for p in made
    )
    return PlacedStep(made, PlacementSpec(specs, programs))


def _holders(number: int | None, count: int) -> tuple[int, ...]:
    return tuple(range(count)) if number is None else (number,)


class _PartMaker:
    """Gathers the segments of one part."""

    def __init__(self, number: int, part: Part, graph: StepGraph, holders: Mapping[str, Sequence[int]]) -> None:
        self._part, self._whole = part, graph
        self._state = tuple(t for t in graph.state if number in holders[t.name])
        names = {t.name for t in self._state}
        self._gradients = tuple(name for name in graph.gradients if name in names)
        self._functions: dict[str, Function] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._entries: list[EntryPoint] = []
        self._ranges = list(graph.ranges)

    def add(self, number: int, segment: Segment, entry: EntryPoint, check: Function | None) -> Call:
        """Add a segment of `entry`, with the check of the entry's inputs, if it is the first that runs.

        Raises:
            UserError: the check reads state of another part.
        """
        name = f"{entry.name}.{number}"
        specs = {entry.key(s.name): s for s in entry.inputs}
        function = _renamed(segment.function, name, specs)
        self._functions[name] = function
        taken = dict(self._examples(function))
        if check is not None:
            self._refuse_foreign(check)
            early = _renamed(check, name, specs)
            self._functions[f"check.{name}"] = early
            taken |= self._examples(early)
            ranges = {specs[r.input].name: r for r in self._whole.ranges if r.input in specs}
            self._ranges += [replace(r, input=of_entry(name, own)) for own, r in ranges.items()]
        self._inputs |= taken
        inputs = tuple(_spec(key.removeprefix(of_entry(name, "")), tensor, entry) for key, tensor in taken.items())
        hypers = tuple(a.name for a in function.arguments if a.kind == "hyper")
        outputs = tuple(
            TensorSpec(r.name, numpy_name(t.dtype), tuple(t.shape))
            for r, t in zip(function.results, function.results_like(), strict=True)
            if r.kind == "output"
        )
        summary = f"Segment {number} of {entry.name}."
        made = EntryPoint(name, inputs, hypers, outputs or (_STEPS,), summary)
        self._entries.append(made)
        return Call(self._part.name, made, tuple(r.name for r in function.results if r.kind == "state"))

    def made(self, whole: Interface) -> PlacedPart:
        """The part, once it has all its segments."""
        hypers = {**self._whole.hypers, COUNT: 1.0}
        entries = {e.name: tuple(of_entry(e.name, s.name) for s in e.inputs) for e in self._entries}
        graph = StepGraph(
            self._state,
            self._gradients,
            self._inputs,
            hypers,
            functions=self._functions,
            precision=self._whole.precision,
            entries=entries,
            ranges=tuple(self._ranges),
            computed=self._whole.computed,
        )
        names = {t.name for t in self._state}
        state = tuple(s for s in whole.state if s.name in names)
        needed = [n for n in _OF_PART if n in whole or (n in OF_GRADIENTS and whole.accumulates)]
        points = (*self._entries, *(self._of_state(n, state) for n in needed))
        return PlacedPart(self._part, graph, Interface(points, state))

    def _of_state(self, name: str, state: Sequence[StateSpec]) -> EntryPoint:
        tensors = tuple(TensorSpec(s.name, s.dtype, s.shape) for s in state)
        count = TensorSpec("count", "int64", ())
        sums = (*(t for t in tensors if t.name in self._gradients), count)
        signatures = {
            "export_state": ((), tensors),
            "import_state": (tensors, (_STEPS,)),
            "export_gradients": ((), sums),
            "import_gradients": (sums, (count,)),
            "reset": ((), (_STEPS,)),
        }
        inputs, outputs = signatures[name]
        return EntryPoint(name, inputs, (), outputs, SUMMARIES[name])

    def _examples(self, function: Function) -> list[tuple[str, torch.Tensor]]:
        return [(a.name, function.example(i)) for i, a in enumerate(function.arguments) if a.kind == "input"]

    def _refuse_foreign(self, check: Function) -> None:
        names = {t.name for t in self._state}
        if foreign := [a.name for a in check.arguments if a.kind == "state" and a.name not in names]:
            raise UserError(
                f"an index of this step is computed from {foreign[0]!r}, and the part {self._part.name!r} that runs "
                f"first does not hold it: place {foreign[0]!r} there"
            )


def _renamed(function: Function, segment: str, specs: Mapping[str, TensorSpec]) -> Function:
    """`function` over the inputs and outputs of the entry point of a segment."""

    def own(value: Value, *, given: bool) -> Value:
        if value.kind == "input":
            return Value("input", of_entry(segment, specs[value.name].name))
        if value.kind == "passed":
            name = PASSED + value.name
            return Value("input", of_entry(segment, name)) if given else Value("output", name)
        if value.kind == "count":
            return Value("hyper", COUNT)
        if value.kind == "output" and value.name in specs:  # of a check
            return Value("output", of_entry(segment, specs[value.name].name))
        return value

    arguments = tuple(own(a, given=True) for a in function.arguments)
    results = tuple(own(r, given=False) for r in function.results)
    return Function(function.graph, arguments, results)


def _spec(name: str, tensor: torch.Tensor, entry: EntryPoint) -> TensorSpec:
    known = next((s for s in entry.inputs if s.name == name), None)
    return known or TensorSpec(name, numpy_name(tensor.dtype), tuple(tensor.shape))
