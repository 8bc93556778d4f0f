"""Bounds of new tensors: constants, counts and random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.bound_rules.registry import Known, expression_of, rule
from irongrad.pipeline.guards.intervals import UNKNOWN, Interval, number


@rule("rand rand_like")
def _random(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    bits = {torch.float32: 24, torch.float64: 53}.get(node.meta["val"].dtype)
    return Interval(0, 1 - 2.0**-bits if bits else 1)


@rule("randint randint_like random")
def _random_integers(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    return Interval(expression_of(low), expression_of(high) - 1) if high is not None else UNKNOWN


@rule("zeros zeros_like new_zeros")
def _zeros(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return number(0)


@rule("ones ones_like new_ones")
def _ones(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return number(1)


@rule("full full_like new_full fill scalar_tensor")
def _constant(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    found = next(arguments[n] for n in ("fill_value", "value", "s") if n in arguments)
    made = bounds.of(found)
    return intervals.truncated(made) if not node.meta["val"].dtype.is_floating_point else made


@rule("arange")
def _arange(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    value = node.meta["val"]
    first = expression_of(start)
    if value.dtype.is_floating_point or not isinstance(step, int) or isinstance(start, float):
        return UNKNOWN
    last = first + (expression_of(value.shape[0]) - 1) * step
    return Interval(*((first, last) if step > 0 else (last, first)), exact=True)
