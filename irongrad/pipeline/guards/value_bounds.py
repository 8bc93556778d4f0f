"""Interval analysis of an exported graph: the least and the largest value of each node.

Constants have the bounds of their values, inputs and parameters those of their dtype. Sizes may be symbols. Whatever a
rule does not know has no bounds. An integer that a loop hands on from one iteration to the next has bounds that hold at
first, and again after an iteration from a value within them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from irongrad.graph.flat_graph import Carry
from irongrad.graph.movements import Movement, names
from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.bound_rules import bound_rules
from irongrad.pipeline.guards.bound_rules.conditions import comparisons, limited, plain
from irongrad.pipeline.guards.bound_rules.positions import POOLS_WITH_PLACES, WITH_PLACES, places
from irongrad.pipeline.guards.bound_rules.registry import (
    EACH_EXPANDED,
    SEES_THROUGH,
    below,
    expression_of,
    inexact,
    is_symbol,
)
from irongrad.pipeline.guards.index_uses import arguments_of, operator_name
from irongrad.pipeline.guards.intervals import INFINITE, UNKNOWN, Interval, clamped, join, number

_DEEPEST = 150  # further operators up from an index, a node has no bounds

# How many carries have assumed bounds at once.
_WIDENED = 2  # a carry that is not within its first bounds may be within these and what an iteration then makes
_MOST_ASSUMED = 2


class Bounds:
    """The bounds of the nodes of a graph, computed when they are asked for.

    Args:
        known: the bounds of some nodes, such as inputs with a range.
        origins: the nodes that compute a value, inside or outside of a region.
        unknown: nodes without bounds, because something writes into their memory.
        carries: the values that loops hand on.
        constants: the bounds of constants.
    """

    def __init__(
        self,
        known: Mapping[Node, Interval],
        origins: Callable[[Any], list[Any]] = lambda value: [value],
        unknown: Collection[Node] = (),
        carries: Mapping[Node, Carry] | None = None,
        constants: Mapping[Node, Interval] | None = None,
    ) -> None:
        self._found: dict[Node, Interval] = dict(known)
        self._constants = constants or {}
        self._origins = origins
        self._unknown = unknown
        self._carries = carries or {}
        self._assumed = 0
        self._depth = 0

    def of(self, value: Any) -> Interval:
        """Return the bounds of a node or a number; an interval is its own."""
        if isinstance(value, Node):
            return join(self._of_node(origin) for origin in self._origins(value))
        if isinstance(value, Interval):
            return value
        if isinstance(value, torch.SymInt):
            return number(expression_of(value))
        if isinstance(value, bool | int | float):
            return number(value) if math.isfinite(value) else UNKNOWN
        return UNKNOWN

    def is_permutation(self, value: Any, size: Any) -> bool:
        """Whether a node has every number below `size` once."""
        found = [o for o in self._origins(value) if isinstance(o, Node)]
        if len(found) != 1 or found[0] in self._unknown or len(found[0].meta["val"].shape) != 1:
            return False
        (node,) = found
        name = operator_name(node)
        if name in SEES_THROUGH:
            return self.is_permutation(node.args[0], size)
        if node.target is operator.getitem and node.args[1] == 1:
            sorts = [o for o in self._origins(node.args[0]) if isinstance(o, Node)]
            name = operator_name(sorts[0]) if len(sorts) == 1 else ""
        is_one = name in ("argsort", "sort", "randperm")
        return is_one and expression_of(node.meta["val"].shape[0]) == expression_of(size)

    def _of_node(self, node: Any) -> Interval:
        if not isinstance(node, Node):
            return self.of(node)
        if node not in self._found and node in self._constants:
            self._found[node] = self._constants[node]
        if node not in self._found:
            if self._depth > _DEEPEST:
                return UNKNOWN
            self._depth += 1
            self._found[node] = self._computed(node)
            self._depth -= 1
        return self._found[node]

    def _computed(self, node: Node) -> Interval:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            return number(expression_of(value))
        if node in self._unknown or not isinstance(value, torch.Tensor):
            return UNKNOWN
        if node in self._carries:
            return self._handed_on(node, value.dtype)
        if node.target is operator.getitem:
            return self._part(node, value)
        rule = bound_rules().get(operator_name(node)) if isinstance(node.target, torch._ops.OpOverload) else None
        found = rule(self, node, arguments_of(node)) if rule is not None else UNKNOWN
        return _representable(found, value.dtype)

    def _handed_on(self, node: Node, dtype: torch.dtype) -> Interval:
        """The bounds of a carry: they hold at first, and again after an iteration."""
        every = _representable(UNKNOWN, dtype)
        if dtype.is_floating_point or dtype.is_complex or self._assumed == _MOST_ASSUMED:
            return every
        start, widest = self.of(self._carries[node].initial).whole(), self._after(node, every, changed=True)
        if -INFINITE in (start.low, -start.high):
            return _representable(self._after(node, every), dtype)
        kept = Interval(
            widest.low if widest.low != -INFINITE else start.low, widest.high if widest.high != INFINITE else start.high
        )
        for _ in range(_WIDENED):
            made = self._after(node, kept)
            if intervals.at_most(kept.low, made.low) and intervals.at_most(made.high, kept.high):
                return kept
            kept = join([kept, made]).whole()
        return self._counted(node, start) or _representable(self._after(node, every), dtype)

    def _counted(self, node: Node, start: Interval) -> Interval | None:
        """The bounds of a counter, to which each of a known number of iterations adds something; None if it is none."""
        carry = self._carries[node]
        handed = plain(carry.handed)
        if carry.trips is None or not isinstance(handed, Node) or operator_name(handed) != "add":
            return None
        step = self.of(handed.args[1])
        is_fixed = isinstance(step.low, int) and step.low == step.high and not handed.kwargs
        if plain(handed.args[0]) is not node or not is_fixed:
            return None
        turns = max(carry.trips - 1, 0)
        return Interval(start.low + min(0, step.low) * turns, start.high + max(0, step.high) * turns)

    def _after(self, node: Node, assumed: Interval, *, changed: bool = False) -> Interval:
        """The bounds of a carry at the start of an iteration, if they were `assumed` at the start of the one before.

        With `changed`, an iteration that hands on what it got is left out.
        """
        carry, found = self._carries[node], dict(self._found)
        self._found[node] = assumed
        self._assumed += 1
        handed = _changed(carry.handed, node) if changed else [carry.handed]
        made = join(map(self.of, [carry.initial, *handed])).whole()
        if carry.asked is not None:
            made = limited(self, made, comparisons(carry.condition, carry.asked, holds=True))
        self._assumed -= 1
        self._found = found
        return made

    def _part(self, node: Node, value: torch.Tensor) -> Interval:
        """The bounds of one of several results."""
        whole, place = node.args
        found = [origin for origin in self._origins(whole) if isinstance(origin, Node)]
        if len(found) != 1 or not isinstance(found[0].target, torch._ops.OpOverload):
            return _representable(UNKNOWN, value.dtype)
        name, arguments = operator_name(found[0]), arguments_of(found[0])
        if name in WITH_PLACES:
            made = self.of(arguments["self"]) if place == 0 else places(found[0], arguments)
        elif name in POOLS_WITH_PLACES:
            sizes = arguments["self"].meta["val"].shape[-POOLS_WITH_PLACES[name] :]
            made = self.of(arguments["self"]) if place == 0 else below(math.prod(sizes))
        elif name in names(Movement.SPLIT):
            made = inexact(self.of(arguments["self"]))
        elif name in EACH_EXPANDED:
            made = self.of(arguments["tensors"][place])
        else:
            made = UNKNOWN
        return _representable(made, value.dtype)


def _changed(value: Any, node: Node) -> list[Any]:
    """What `value` is chosen from by `where`, other than `node` itself."""
    value = plain(value)
    if value is node:
        return []
    if isinstance(value, Node) and operator_name(value) in names(Movement.OVERWRITE):
        return _changed(value.args[1], node)
    if isinstance(value, Node) and value.target is torch.ops.aten.where.self:
        return [*_changed(value.args[1], node), *_changed(value.args[2], node)]
    return [value]


class ConstantBounds(Mapping[Node, Interval]):
    """The bounds of constants, each computed when it is asked for: a frozen model has constants of many megabytes.

    Args:
        tensors: the values of the constants.
        others: the bounds of what has no value that is known.
    """

    def __init__(
        self, tensors: Mapping[Node, torch.Tensor], others: Mapping[Node, Interval] = MappingProxyType({})
    ) -> None:
        self._tensors, self._others = tensors, others
        self._found: dict[Node, Interval] = {}

    def beside(self, others: Mapping[Node, Interval]) -> ConstantBounds:
        """The same bounds with others beside them; what was asked for stays asked for."""
        made = ConstantBounds(self._tensors, others)
        made._found.update(self._found)
        return made

    @property
    def asked(self) -> Mapping[Node, Interval]:
        """The bounds that were asked for so far."""
        return self._found

    def __getitem__(self, node: Node) -> Interval:
        if node not in self._found:
            self._found[node] = self._others.get(node) or constant_bounds(self._tensors[node])
        return self._found[node]

    def __contains__(self, node: object) -> bool:
        return node in self._tensors or node in self._others

    def __iter__(self) -> Iterator[Node]:
        return iter([*self._tensors, *self._others])

    def __len__(self) -> int:
        return len(self._tensors) + len(self._others)


def constant_bounds(tensor: torch.Tensor) -> Interval:
    """Return the bounds of a tensor whose values are known."""
    if tensor.numel() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
        return UNKNOWN
    values = tensor.detach()
    if values.dtype not in (torch.float32, torch.float64, torch.int64):
        values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    low, high = values.min().item(), values.max().item()
    return Interval(low, high, exact=True) if math.isfinite(low) and math.isfinite(high) else UNKNOWN


def _representable(found: Interval, dtype: torch.dtype) -> Interval:
    """The bounds of numbers as a dtype holds them: integers wrap around, and floats are rounded."""
    if dtype is torch.bool:
        return clamped(found, 0, 1) if found.low != -INFINITE else Interval(0, 1)
    if dtype.is_floating_point:
        return _rounded_to(found, dtype)
    if dtype.is_complex:
        return UNKNOWN
    info = torch.iinfo(dtype)
    ends = (found.low, found.high, *found.points)
    if all(intervals.at_most(info.min, e) and intervals.at_most(e, info.max) for e in ends if abs(e) != INFINITE):
        if dtype is torch.int64:
            return found
        if INFINITE not in map(abs, ends):
            return found
    elif dtype is torch.int64 and any(is_symbol(e) for e in ends):
        return found  # sizes are far below the largest integer
    return UNKNOWN if dtype is torch.int64 else Interval(info.min, info.max)


_FLOATS: dict[torch.dtype, Any] = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def _rounded_to(found: Interval, dtype: torch.dtype) -> Interval:
    """Ends that hold the numbers before and after rounding; compiled code may leave out a rounding."""
    low, high = _nearest(found.low, dtype, -1), _nearest(found.high, dtype, 1)
    return Interval(intervals.lower([low, found.low]), intervals.higher([high, found.high]), found.points, found.exact)


def _nearest(end: Any, dtype: torch.dtype, sign: int) -> Any:
    if is_symbol(end) or abs(end) == INFINITE:
        return end
    if dtype not in _FLOATS:  # bfloat16 has 8 bits
        return float(end) + sign * abs(float(end)) * 2**-8
    with np.errstate(over="ignore"):
        return float(_FLOATS[dtype](float(end)))
