"""Decide for each index of a step how it stays within its tensor: proved, checked as an input, or computed early.

Eager checks an index where it is used. Compiled code does not: an index out of range reads or writes other memory. So
for each use of an index one of these holds:

* Its bounds (`irongrad.pipeline.guards.value_bounds`) are within the range.
* It holds elements of an input, or of an input and a constant number. Then the input has a range, which each entry
  point checks at the start of a call.
* It is computed from inputs and constants. Then each entry point computes it at the start of a call, and checks it
  (`irongrad.pipeline.guards.early_checks`).

Any other index is refused at compile time, with its line. An assertion is decided on likewise: its condition is proved,
or computed early.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from irongrad.graph.flat_graph import Carry
from irongrad.graph.movements import OF_ONE_TENSOR, Movement, names
from irongrad.graph.step_graph import Range
from irongrad.pipeline.guards.bound_rules.registry import EACH_EXPANDED, expression_of
from irongrad.pipeline.guards.index_uses import (
    Assertion,
    Use,
    arguments_of,
    assertions_of,
    is_integer,
    operator_name,
    uses_of,
)
from irongrad.pipeline.guards.intervals import INFINITE, Interval, at_most, cut_above
from irongrad.pipeline.guards.value_bounds import Bounds
from irongrad.runtime.manifest import UNLIMITED
from irongrad.sizes.dimensions import Names, named_size
from irongrad.sizes.expressions import in_dimensions, symbol, unit_of

# The result of these has all elements of its operands, or all but a slice, unchanged. A `select` takes out a column,
# which often means something else than the other columns.
_SAME_VALUES = names((OF_ONE_TENSOR | Movement.PAD | Movement.CAST) & ~Movement.CUT) | {"slice", "repeat_interleave"}
_JOINS = names(Movement.JOIN)

# By input: a number that is added to its elements.
Source = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class View:
    """A program as this analysis reads it.

    Attributes:
        nodes: its nodes in order, with those of regions.
        inputs: the names of its inputs, by placeholder.
        known: the bounds of its constants.
        names: the symbols in sizes, as expressions of named dimensions.
        origins: the nodes that compute a value, inside or outside of a region.
        opaque: nodes whose values may change after them, or from one iteration of a loop to the next.
        carries: what the latter hold, if nothing writes into them.
        state: what state holds whose bounds are known because the program keeps it within them.
    """

    nodes: Sequence[Node]
    inputs: Mapping[Node, str]
    known: Mapping[Node, Interval]
    names: Names = field(default_factory=dict)
    origins: Callable[[Any], list[Any]] = lambda value: [value]
    opaque: Collection[Node] = ()
    carries: Mapping[Node, Carry] = field(default_factory=dict)
    state: Mapping[Node, Carry] = field(default_factory=dict)

    def bounds(self, known: Mapping[Node, Interval] | None = None) -> Bounds:
        """The bounds of the program's nodes, with those of further nodes known."""
        unknown = {node for node in self.opaque if node not in self.carries}
        return Bounds(known or {}, self.origins, unknown, self.carries, self.known)


@dataclass(frozen=True)
class Verdicts:
    """How the indices of a program stay within their tensors.

    Attributes:
        ranges: the ranges of inputs.
        proved: the uses that are within bounds.
        by_input: the uses that are, if the inputs are within their ranges.
        conditions: relations between named dimensions under which further uses in `proved` are.
        open: all other uses.
        bounds: the bounds of nodes, whatever the inputs are.
    """

    ranges: Mapping[str, Range]
    proved: tuple[Use, ...]
    by_input: tuple[Use, ...]
    conditions: tuple[Any, ...]
    open: tuple[Use, ...]
    bounds: Bounds


def verdicts_on(view: View) -> Verdicts:
    """Decide on every use of an index in a program, and on every assertion."""
    uses = [use for node in view.nodes for use in uses_of(node)]
    plain = view.bounds()
    proved = [use for use in uses if is_within(use, plain, view.names)]
    sized = {use: asked for use in uses if use not in proved and (asked := _conditions(use, plain, view.names))}
    rest = [use for use in uses if use not in proved and use not in sized]
    sources = _sources(view, plain)
    held = {use: found for use in rest if (found := _held(use, sources, view)) and _is_held(use, found, view)}
    ranges = _ranges(held, view.names)
    inside = bounds_given(ranges, view)
    proved += [*sized, *(use for use in rest if use not in held and is_within(use, inside, view.names))]
    conditions = tuple(c for asked in sized.values() for c in asked)
    left = [use for use in rest if use not in held and use not in proved]
    for assertion in (found for node in view.nodes for found in assertions_of(node)):
        (proved if holds(assertion, plain) else left).append(assertion)
    return Verdicts(ranges, tuple(proved), tuple(held), conditions, tuple(left), plain)


def bounds_given(ranges: Mapping[str, Range], view: View) -> Bounds:
    """The bounds of nodes if the inputs are within `ranges`."""
    known = {node: _assumed(ranges[name], view.names) for node, name in view.inputs.items() if name in ranges}
    return view.bounds(known)


def is_within(use: Use, bounds: Bounds, known: Names | None = None) -> bool:
    """Whether bounds prove that an index is in range.

    Args:
        use: the use of the index.
        bounds: the bounds of nodes.
        known: the symbols in sizes, as expressions of named dimensions; two inputs of one name have equal sizes.
    """

    def named(size: Any) -> Any:
        return size.xreplace(dict(known)) if known and isinstance(size, sympy.Basic) else size

    found, size = bounds.of(use.index), named(expression_of(use.limit))
    least = -named(expression_of(use.size)) if use.from_end else 0
    low, high, points = named(found.low), named(found.high), [named(p) for p in found.points]
    singles = all(p == use.exempt or (at_most(least, p) and at_most(p, size - 1)) for p in points)
    return singles and at_most(least, low) and at_most(high, size - 1)


def holds(assertion: Assertion, bounds: Bounds) -> bool:
    """Whether bounds prove that a condition is not zero."""
    found = bounds.of(assertion.index)
    return 0 not in found.points and (at_most(1, found.low) or at_most(found.high, -1))


def _held(use: Use, sources: Mapping[Node, Source], view: View) -> Source:
    """The inputs that an index holds elements of.

    An input plus a number, into a size that varies, has no range: its lower end varies too.
    """
    found = _source_of(use.index, sources, view.origins)
    moves_end = use.from_end and isinstance(use.size, torch.SymInt) and any(offset for _, offset in found)
    return frozenset() if moves_end else found


def _is_held(use: Use, source: Source, view: View) -> bool:
    """Whether an index is in range if the inputs that it holds are in the ranges that it needs."""
    return is_within(use, bounds_given(_ranges({use: source}, view.names), view), view.names)


def _conditions(use: Use, bounds: Bounds, known: Names) -> list[Any]:
    """The conditions on sizes under which an index that depends on sizes alone is in range; none for other indices."""
    found, size = bounds.of(use.index), expression_of(use.limit)
    if not found.exact or found.points or INFINITE in (abs(found.low), abs(found.high)):
        return []
    least = -expression_of(use.size) if use.from_end else 0
    asked = [sympy.Le(found.high, size - 1), sympy.Ge(found.low, least)]
    if sympy.false in asked:
        return []
    return [in_dimensions(c.xreplace(dict(known))) for c in asked if c.free_symbols]


def _sources(view: View, bounds: Bounds) -> dict[Node, Source]:
    """The inputs whose elements a node holds, perhaps with a number added; it may hold constants too."""
    found: dict[Node, Source] = {n: frozenset({(name, 0)}) for n, name in view.inputs.items() if _is_signed(n)}
    for node in view.nodes:
        # The first iteration of a loop that certainly runs has the initial value. What an iteration hands on may be
        # anything: `_is_held` proves that it stays in the range of the inputs.
        if node in view.carries and view.carries[node].trips and _is_signed(node):
            found[node] = _source_of(view.carries[node].initial, found, view.origins)
        elif node not in found and node not in view.opaque:
            found[node] = _source(node, found, view.origins, bounds)
    return found


def _source(node: Node, found: Mapping[Node, Source], origins: Callable[[Any], list[Any]], bounds: Bounds) -> Source:
    if node.target is operator.getitem:
        whole = [o for o in origins(node.args[0]) if isinstance(o, Node)]
        if len(whole) == 1 and operator_name(whole[0]) in EACH_EXPANDED:
            return _source_of(arguments_of(whole[0])["tensors"][node.args[1]], found, origins)
        same = all(operator_name(o) in names(Movement.SPLIT) for o in whole)
        return _source_of(node.args[0], found, origins) if same else frozenset()
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    name = operator_name(node)
    if name in names(Movement.SPLIT) or (_is_signed(node) and name in _SAME_VALUES):
        return _source_of(node.args[0], found, origins)
    if not _is_signed(node):
        return frozenset()
    if name in names(Movement.OVERWRITE):
        return _source_of(node.args[1], found, origins)
    if name in _JOINS:
        return frozenset().union(*(_source_of(t, found, origins) for t in node.args[0]))
    if name in ("add", "sub"):
        return _shifted(node, found, origins, bounds)
    return frozenset()


def _shifted(node: Node, found: Mapping[Node, Source], origins: Callable[[Any], list[Any]], bounds: Bounds) -> Source:
    """The source of a sum or difference of a node and a constant number."""
    arguments = arguments_of(node)
    if arguments.get("alpha", 1) != 1:
        return frozenset()
    left, right = arguments["self"], arguments["other"]
    if operator_name(node) == "add" and not _source_of(left, found, origins):
        left, right = right, left
    by = bounds.of(right)
    if not by.is_number or not isinstance(by.low, int) or isinstance(by.low, bool):
        return frozenset()
    shift = by.low if operator_name(node) == "add" else -by.low
    return frozenset((name, offset + shift) for name, offset in _source_of(left, found, origins))


def _source_of(value: Any, found: Mapping[Node, Source], origins: Callable[[Any], list[Any]]) -> Source:
    every = origins(value) if isinstance(value, Node) else []
    return frozenset().union(*(found.get(o, frozenset()) for o in every))


def _is_signed(node: Node) -> bool:
    return is_integer(node) and node.meta["val"].dtype is not torch.uint8


def _ranges(held: Mapping[Use, Source], known: Names) -> dict[str, Range]:
    """The ranges of inputs: each is the intersection of what its uses allow."""
    ranges: dict[str, Range] = {}
    for use, source in held.items():
        for name, offset in sorted(source):
            ranges[name] = intersection(ranges.get(name), moved(range_of(name, use, known), -offset))
    return ranges


def range_of(name: str, use: Use, known: Names) -> Range:
    """The range of an index.

    If the size varies, so does a lower bound below zero. The range then starts at zero instead.
    """
    size = named_size(use.limit, known)
    if isinstance(size, int):
        return Range(name, -int(use.size) if use.from_end else 0, size - 1, use.exempt)
    return Range(name, 0, UNLIMITED, use.exempt, (size - 1,))


def moved(limit: Range, by: int) -> Range:
    """The range of numbers that are in `limit` when `by` is subtracted from them."""
    exempt = None if limit.exempt is None else limit.exempt + by
    most = limit.maximum if limit.limits else limit.maximum + by
    return Range(limit.input, limit.minimum + by, most, exempt, tuple(m + by for m in limit.limits))


def intersection(a: Range | None, b: Range) -> Range:
    """The range of numbers that are in both ranges."""
    if a is None:
        return b
    exempt = a.exempt if a.exempt == b.exempt else None
    limits = tuple(dict.fromkeys((*a.limits, *b.limits)))
    return Range(a.input, max(a.minimum, b.minimum), min(a.maximum, b.maximum), exempt, limits)


def merged(found: Iterable[Range]) -> list[Range]:
    """One range for each input: the values that all of `found` accept."""
    ranges: dict[str, Range] = {}
    for limit in found:
        ranges[limit.input] = intersection(ranges.get(limit.input), limit)
    return list(ranges.values())


def _assumed(limit: Range, known: Names) -> Interval:
    symbols = {symbol(u[0]): u[1] * s for s, e in known.items() if e.is_Symbol and (u := unit_of(e) or (e.name, 1))}
    most: Any = limit.maximum
    for further in limit.limits:
        most = cut_above(most, further.xreplace(symbols)) if most != UNLIMITED else further.xreplace(symbols)
    return Interval(limit.minimum, most, frozenset(() if limit.exempt is None else {limit.exempt}))
