"""What keeps every index of a step, or of a function, within its tensor; or why it is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch.export import ExportedProgram
from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of, without_folders
from irongrad.graph.step_graph import Range, Relied
from irongrad.pipeline.guards.early_checks import Part
from irongrad.pipeline.guards.index_ranges import Verdicts, merged, range_of
from irongrad.pipeline.guards.index_uses import Assertion, Use, operator_name
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import BY_INPUT, EARLY, PROVED, IndexSpec, TensorSpec
from irongrad.runtime.refusals import interval_of
from irongrad.sizes.dimensions import Names

# Indices that are computed early, with their ranges.
Checks: TypeAlias = list[tuple[Use, Range]]


@dataclass(frozen=True)
class EarlyProgram:
    """A program that computes indices at the start of a call.

    Attributes:
        program: inputs and constants -> how far each index is out of its range.
        inputs: the names of its inputs, in order.
        results: the names of its results.
    """

    program: ExportedProgram
    inputs: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Indices:
    """What keeps the indices of a step, or of a function, within their tensors.

    Attributes:
        ranges: the ranges of inputs.
        computed: the ranges of indices that entry points compute early; `Range.input` is the name of a check's result.
        early: the programs that compute them, by the function of the step graph that relies on them.
        conditions: relations between named dimensions under which all indices that depend on sizes alone are in range.
        specs: a record of every index, for the manifest.
        relied: what proofs rely on of the values of state, by its path in the step's module.
    """

    ranges: tuple[Range, ...] = ()
    computed: tuple[Range, ...] = ()
    early: Mapping[str, EarlyProgram] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()
    specs: tuple[IndexSpec, ...] = ()
    relied: Mapping[str, Relied] = field(default_factory=dict)


@dataclass(frozen=True)
class Decided:
    """A program whose indices are decided on.

    Attributes:
        verdicts: the decisions.
        inputs: the names of inputs, by placeholder.
        known: the symbols in its sizes, as expressions of named dimensions.
        part: what a check may compute of it; None if all indices are decided without one.
        relied: what the proofs rely on of constants and of state, by placeholder.
    """

    verdicts: Verdicts
    inputs: Mapping[Node, str]
    known: Names
    part: Part | None = None
    relied: Mapping[Node, Relied] = field(default_factory=dict)


class Decisions:
    """Gathers the decisions on the programs of a step."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._computed: list[Range] = []
        self._conditions: list[Any] = []
        self._specs: dict[IndexSpec, None] = {}
        self._refused: dict[str, None] = {}

    def add(self, made: Decided, name: str, first: Collection[str] | None = None) -> dict[str, Checks]:
        """Add the decisions on a program.

        Args:
            made: the decisions.
            name: the function of the step graph that runs the program.
            first: for a step in two pieces, the inputs that the first piece takes.

        Returns:
            The indices that have to be computed early, by the function that relies on them.
        """
        self._ranges += made.verdicts.ranges.values()
        self._conditions += made.verdicts.conditions
        self._record(made.verdicts.proved, PROVED, made.known)
        self._record(made.verdicts.by_input, BY_INPUT, made.known)
        pieces: dict[str, Checks] = {}
        for use in made.verdicts.open:
            assert made.part is not None
            if made.part.settles(use, range_of("", use, made.known)):
                self._record([use], PROVED, made.known)
                continue
            reason = made.part.why_not(use)
            piece = name if first is None else _piece(use, made, first)
            if reason is not None or piece is None:
                self._refuse(use, reason or "depends on inputs of both pieces of the step", made.known)
                continue
            label = f"index {len(self._computed)}"
            limit = _described(range_of(label, use, made.known), use)
            self._computed.append(limit)
            pieces.setdefault(piece, []).append((use, limit))
            self._record([use], EARLY, made.known)
        return pieces

    def _record(self, uses: Iterable[Use], how: str, known: Names) -> None:
        for use in uses:
            self._specs[_spec(use, how, known)] = None

    def _refuse(self, use: Use, reason: str, known: Names) -> None:
        said = _spec(use, "", known)
        if isinstance(use, Assertion):
            self._refused[
                f"{use.line}\n  the condition {reason}, and is not proved to hold. Compiled code cannot stop in "
                "the middle of a step, as eager does. Leave it out; to look at it after the step, let the loss return "
                "it as a value beside the loss"
            ] = None
            return
        self._refused[
            f"{line_of(use.node)}\n  the index of {said.operator} {reason}, and is not proved to be in "
            f"{said.range}. Compiled code cannot stop in the middle of a step, as eager does for an index out of "
            "range. Clamp it: index.clamp(0, size - 1), or take index % size"
        ] = None

    def indices(self, early: Mapping[str, EarlyProgram] | None = None) -> Indices:
        """Return all decisions.

        Args:
            early: as in `Indices`.

        Raises:
            CaptureError: indices are refused.
        """
        if self._refused:
            raise CaptureError("\n".join(self._refused))
        ranges = tuple(merged(self._ranges))
        conditions = tuple(dict.fromkeys(self._conditions))
        return Indices(ranges, tuple(self._computed), early or {}, conditions, tuple(self._specs))


def _piece(use: Use, made: Decided, first: Collection[str]) -> str | None:
    """The piece of a step that has all inputs an index depends on; None if no piece has."""
    assert made.part is not None
    needed = {made.inputs[n] for n in made.part.needed([use.index]) if n in made.inputs}
    if needed <= set(first):
        return "forward"
    return "finish" if not needed & set(first) else None


def _spec(use: Use, how: str, known: Names) -> IndexSpec:
    if isinstance(use, Assertion):
        return IndexSpec(without_folders(use.line), "assert", "true", how)
    limit = range_of("", use, known)
    spec = TensorSpec("", "int64", (), limit.minimum, limit.maximum, limit.exempt, tuple(map(str, limit.limits)))
    return IndexSpec(without_folders(line_of(use.node)), operator_name(use.node), interval_of(spec), how)


def _described(limit: Range, use: Use) -> Range:
    """The range of an index, or of an assertion, with what a refusal says of it."""
    if isinstance(use, Assertion):
        return replace(limit, place=without_folders(use.line), says=use.says or "the condition does not hold")
    return replace(limit, place=f"{without_folders(line_of(use.node))}: the index of {operator_name(use.node)}")
