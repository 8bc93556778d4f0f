"""Bounds of operators that choose by a condition, which may limit the chosen values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.bound_rules.registry import SEES_THROUGH, Known, inexact, rule
from irongrad.pipeline.guards.index_uses import operator_name
from irongrad.pipeline.guards.intervals import INFINITE, UNKNOWN, Interval, join


@rule("masked_fill")
def _filled(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    own = _refined(bounds, arguments["mask"], arguments["self"], holds=False)
    return join([inexact(own), bounds.of(arguments["value"])])


@rule("where")
def _where(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    if "self" not in arguments:
        return UNKNOWN
    chosen = _refined(bounds, arguments["condition"], arguments["self"], holds=True)
    other = _refined(bounds, arguments["condition"], arguments["other"], holds=False)
    return join([_inexact_unless_number(chosen), _inexact_unless_number(other)])


def _inexact_unless_number(found: Interval) -> Interval:
    return found if found.is_number else inexact(found)


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _refined(bounds: Known, condition: Any, value: Any, *, holds: bool) -> Interval:
    """The bounds of `value` where `condition` holds, or where it does not."""
    found = bounds.of(value)
    if not isinstance(value, Node) or value.meta["val"].dtype.is_floating_point:
        return found
    return limited(bounds, found, comparisons(condition, value, holds=holds))


def limited(bounds: Known, found: Interval, known: Sequence[tuple[str, Any]]) -> Interval:
    """The part of an interval for which comparisons hold."""
    for name, limit in known:
        other = bounds.of(limit).whole()
        if (isinstance(limit, Node) and limit.meta["val"].dtype.is_floating_point) or isinstance(limit, float):
            continue
        if name in ("lt", "le", "eq"):
            found = clamped_to(found, high=other.high - (name == "lt"))
        if name in ("gt", "ge", "eq"):
            found = clamped_to(found, low=other.low + (name == "gt"))
    return found


def clamped_to(found: Interval, low: Any = -INFINITE, high: Any = INFINITE) -> Interval:
    """The part of an interval between two limits."""
    found = found.whole()
    return Interval(intervals.cut_below(found.low, low), intervals.cut_above(found.high, high))


def comparisons(condition: Any, value: Node, *, holds: bool) -> list[tuple[str, Any]]:
    """The comparisons of `value` that are true where `condition` holds, or where it does not."""
    if not isinstance(condition, Node) or not isinstance(condition.target, torch._ops.OpOverload):
        return []
    name, arguments = operator_name(condition), list(condition.args)
    if name in ("logical_not", "bitwise_not"):
        return comparisons(arguments[0], value, holds=not holds)
    if name in (("logical_and", "bitwise_and", "mul", "__and__") if holds else ("logical_or", "bitwise_or", "__or__")):
        return [found for a in arguments[:2] for found in comparisons(a, value, holds=holds)]
    if name in SEES_THROUGH:
        return comparisons(arguments[0], value, holds=holds)
    if name not in _NEGATED:
        return []
    left, right = arguments[:2]
    name = name if holds else _NEGATED[name]
    if plain(left) is plain(value):
        return [(name, right)]
    return [(_MIRRORED[name], left)] if plain(right) is plain(value) else []


def plain(value: Any) -> Any:
    """The node that `value` has its values from."""
    while isinstance(value, Node) and operator_name(value) in SEES_THROUGH:
        value = value.args[0]
    return value
