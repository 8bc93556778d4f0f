"""The constants and frozen state whose bounds keep the indices of a program within their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of, without_folders
from irongrad.graph.step_graph import Range, Relied
from irongrad.pipeline.guards.index_ranges import Verdicts, View, bounds_given, holds, is_within
from irongrad.pipeline.guards.index_uses import Assertion, Use
from irongrad.pipeline.guards.intervals import INFINITE, Interval
from irongrad.pipeline.guards.value_bounds import Bounds, ConstantBounds


def relied_bounds(view: View, verdicts: Verdicts) -> dict[Node, Relied]:
    """Return what proofs rely on, by placeholder: the bounds of constants without which an index is not proved.

    Args:
        view: the program.
        verdicts: the decisions on its indices.
    """
    assert isinstance(view.known, ConstantBounds)
    asked = {n: i for n, i in view.known.asked.items() if INFINITE not in (abs(i.low), abs(i.high))}
    proofs, found = _Proofs(view, verdicts.ranges, asked), dict[Node, Relied]()
    for use in (*verdicts.proved, *verdicts.by_input) if asked else ():
        if proofs.hold(use, frozenset()):
            continue
        line = use.line if isinstance(use, Assertion) else line_of(use.node)
        kept = _fewest(use, asked.keys() & _needed([use.index], view.origins), proofs)
        for node in _with_changes(kept, asked.keys(), view) - found.keys():
            found[node] = Relied(without_folders(line), (asked[node].low, asked[node].high), node in view.state)
    return found


def _with_changes(kept: Collection[Node], asked: Collection[Node], view: View) -> set[Node]:
    """The nodes `kept`, and those of `asked` that keep them within their bounds."""
    found, waiting = set[Node](), list(kept)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node in view.state:
                waiting += _needed([view.state[node].handed], view.origins).intersection(asked)
    return found


class _Proofs:
    """Proves indices again, with fewer constants.

    Args:
        view: the program.
        ranges: the ranges of its inputs.
        constants: the bounds of its constants.
    """

    def __init__(self, view: View, ranges: Mapping[str, Range], constants: Mapping[Node, Interval]) -> None:
        self._view, self._ranges, self._constants = view, ranges, constants
        self._bounds: dict[frozenset[Node], tuple[Bounds, Bounds]] = {}

    def hold(self, use: Use, known: frozenset[Node]) -> bool:
        """Whether an index is in range, or an assertion holds, by the bounds of the constants `known` alone."""
        if known not in self._bounds:
            view = replace(self._view, known={node: self._constants[node] for node in known})
            self._bounds[known] = view.bounds(), bounds_given(self._ranges, view)
        plain, inside = self._bounds[known]
        if isinstance(use, Assertion):
            return holds(use, plain)
        return is_within(use, plain, self._view.names) or is_within(use, inside, self._view.names)


def _fewest(use: Use, constants: Collection[Node], proofs: _Proofs) -> frozenset[Node]:
    """Leave out of `constants` all whose values do not matter to an index, such as those that are taken modulo."""
    kept = frozenset(constants)
    for node in sorted(constants, key=lambda n: n.name):
        if proofs.hold(use, kept - {node}):
            kept -= {node}
    return kept


def _needed(values: Iterable[Node], origins: Callable[[Any], list[Any]]) -> set[Node]:
    """All nodes that `values` are computed from, through the borders of regions."""
    seen, waiting = set[Node](), [o for value in values for o in origins(value) if isinstance(o, Node)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [o for n in node.all_input_nodes for o in origins(n) if isinstance(o, Node)]
    return seen
