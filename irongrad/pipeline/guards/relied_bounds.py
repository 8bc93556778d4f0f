"""The constants and frozen state whose bounds keep the indices of a program within their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of, without_folders
from irongrad.graph.step_graph import Relied
from irongrad.pipeline.guards.index_ranges import Verdicts, View
from irongrad.pipeline.guards.index_uses import Assertion
from irongrad.pipeline.guards.intervals import INFINITE
from irongrad.pipeline.guards.value_bounds import ConstantBounds


def relied_bounds(view: View, verdicts: Verdicts) -> dict[Node, Relied]:
    """Return what proofs rely on, by placeholder: bounds of constants that were asked for, and that an index needs.

    Args:
        view: the program.
        verdicts: the decisions on its indices.
    """
    assert isinstance(view.known, ConstantBounds)
    asked = {n: i for n, i in view.known.asked.items() if INFINITE not in (abs(i.low), abs(i.high))}
    found: dict[Node, Relied] = {}
    for use in (*verdicts.proved, *verdicts.by_input) if asked else ():
        line = use.line if isinstance(use, Assertion) else line_of(use.node)
        for node in asked.keys() & _needed([use.index], view.origins) - found.keys():
            found[node] = Relied(without_folders(line), (asked[node].low, asked[node].high))
    return found


def _needed(values: Iterable[Node], origins: Callable[[Any], list[Any]]) -> set[Node]:
    """All nodes that `values` are computed from, through the borders of regions."""
    seen, waiting = set[Node](), [o for value in values for o in origins(value) if isinstance(o, Node)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [o for n in node.all_input_nodes for o in origins(n) if isinstance(o, Node)]
    return seen
