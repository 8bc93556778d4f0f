"""State that a program changes, and that stays within bounds by this change, as `place = (place + 1) % 4` does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor
from torch.fx import Node

from irongrad.graph.flat_graph import Carry
from irongrad.pipeline.guards.index_ranges import View
from irongrad.pipeline.guards.index_uses import is_integer
from irongrad.pipeline.guards.intervals import Interval
from irongrad.pipeline.guards.value_bounds import ConstantBounds, constant_bounds


def with_kept_state(view: View, changes: Iterable[tuple[Node, Tensor, Node]]) -> View:
    """Add the bounds of state to what is known: they hold at capture, and after each call if they did before it.

    Args:
        view: the program, which is functional.
        changes: for each state tensor that nothing else changes, its placeholder, its value, and its new value.
    """
    assert isinstance(view.known, ConstantBounds)
    state = {node: Carry(constant_bounds(value), new) for node, value, new in changes if is_integer(node)}
    found = dict(_kept(replace(view, carries={**view.carries, **state})))
    return replace(view, known=view.known.beside(found), state={node: state[node] for node in found})


def _kept(view: View) -> Iterator[tuple[Node, Interval]]:
    bounds = view.bounds()
    for node, carry in view.carries.items():
        found = bounds.of(node).whole()
        if isinstance(carry.initial, Interval) and isinstance(found.low, int) and isinstance(found.high, int):
            yield node, Interval(found.low, found.high)
