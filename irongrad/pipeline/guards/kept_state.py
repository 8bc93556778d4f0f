"""State that a program changes, and that stays within bounds by this change, as `place = (place + 1) % 4` does."""

from __future__ import annotations

from collections.abc import Iterable
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

    The bounds of one tensor may rely on those of others that are known already. Tensors that rely on each other have
    none, because the bounds of both would have to be assumed at once.

    Args:
        view: the program, which is functional.
        changes: for each state tensor that nothing else changes, its placeholder, its value, and its new value.
    """
    assert isinstance(view.known, ConstantBounds)
    state = {node: Carry(constant_bounds(value), new) for node, value, new in changes if is_integer(node)}
    known, found = view.known, dict[Node, Interval]()
    while True:
        known = known.beside(found)
        more = {n: i for n in state.keys() - found.keys() if (i := _kept(replace(view, known=known), n, state[n]))}
        if not more:
            return replace(view, known=known, state={node: state[node] for node in found})
        found |= more


def _kept(view: View, node: Node, carry: Carry) -> Interval | None:
    """The bounds within which the program keeps a state tensor; None if there are none."""
    found = replace(view, carries={**view.carries, node: carry}).bounds().of(node).whole()
    is_finite = isinstance(found.low, int) and isinstance(found.high, int)
    return Interval(found.low, found.high) if is_finite else None
