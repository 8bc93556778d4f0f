"""Bounds of arithmetic, of rounding, and of reductions."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.bound_rules.registry import SLACK, Known, expression_of, inexact, is_symbol, rule, slack
from irongrad.pipeline.guards.index_uses import operator_name
from irongrad.pipeline.guards.intervals import INFINITE, UNKNOWN, Interval, clamped, join, minus, number, plus, times


@rule("amax amin max min median nanmedian mode mean cummax cummin")
def _of_its_elements(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    own = bounds.of(arguments["self"]).whole()
    if isinstance(arguments.get("other"), Node):  # max.other and min.other
        return _least_or_largest(bounds, node, arguments)
    if operator_name(node) == "mean":
        return Interval(slack(own.low, -1), slack(own.high, 1))
    return inexact(own)


@rule("add sub rsub subtract")
def _added(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    left, right = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    scale = bounds.of(arguments.get("alpha", 1))
    name = operator_name(node)
    if name == "rsub":
        left, right = right, left
        return plus(left, minus(times(right, scale)) if scale != number(1) else minus(right))
    right = right if scale == number(1) else times(right, scale)
    return plus(left, right if name == "add" else minus(right))


@rule("mul multiply")
def _multiplied(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return times(bounds.of(arguments["self"]), bounds.of(arguments["other"]))


@rule("square")
def _squared(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    size = _absolute(bounds, node, arguments)
    return times(size, size)


@rule("neg negative")
def _negated(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return minus(bounds.of(arguments["self"]))


@rule("abs absolute")
def _absolute(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    own = bounds.of(arguments["self"]).whole()
    if intervals.at_most(0, own.low):
        return own
    return Interval(0, intervals.higher([-own.low, own.high]))


@rule("div divide true_divide floor_divide")
def _divided(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    made = intervals.quotient(bounds.of(arguments["self"]), bounds.of(arguments["other"]))
    mode = "floor" if operator_name(node) == "floor_divide" else arguments.get("rounding_mode")
    if mode is None:
        return made
    return intervals.floored(made) if mode == "floor" else intervals.truncated(made)


@rule("remainder fmod")
def _remainder(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    left, right = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    whole = not node.meta["val"].dtype.is_floating_point
    return intervals.remainder(left, right, like_divisor=operator_name(node) == "remainder", whole=whole)


@rule("bitwise_and __and__")
def _bits_of_both(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    every = [bounds.of(arguments[n]).whole() for n in ("self", "other")]
    limits = [i.high for i in every if intervals.at_most(0, i.low)]
    if not limits:
        return UNKNOWN
    return Interval(0, limits[0] if len(limits) == 1 else intervals.cut_above(*limits))


@rule("bitwise_or bitwise_xor __or__ __xor__")
def _bits_of_either(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    every = [bounds.of(arguments[n]).whole() for n in ("self", "other")]
    if any(is_symbol(i.high) or i.high == INFINITE or not intervals.at_most(0, i.low) for i in every):
        return UNKNOWN
    return Interval(0, (1 << max(int(i.high).bit_length() for i in every)) - 1)


@rule("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__")
def _shifted(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    own, by = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    if not by.is_number or not 0 <= by.low < 63:
        return UNKNOWN
    factor = number(1 << int(by.low))
    if "left" in operator_name(node) or "lshift" in operator_name(node):
        return times(own, factor)
    return intervals.floored(intervals.quotient(own, factor))


@rule("clamp clip clamp_min clamp_max hardtanh")
def _clamped(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    low, high = (
        bounds.of(found).whole() if (found := arguments.get(n, arguments.get(f"{n}_val"))) is not None else None
        for n in ("min", "max")
    )
    own = bounds.of(arguments["self"])
    if low is not None and not low.is_number:
        own = _larger(own, low)
        low = None
    if high is not None and not high.is_number:
        return _smaller(clamped(own, low.low if low is not None else None, None), high)
    return clamped(own, low.low if low is not None else None, high.low if high is not None else None)


def _smaller(a: Interval, b: Interval) -> Interval:
    a, b = a.whole(), b.whole()
    return Interval(intervals.lower([a.low, b.low]), intervals.cut_above(a.high, b.high))


def _larger(a: Interval, b: Interval) -> Interval:
    a, b = a.whole(), b.whole()
    return Interval(intervals.cut_below(a.low, b.low), intervals.higher([a.high, b.high]))


@rule("minimum maximum fmin fmax")
def _least_or_largest(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    a, b = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    return _smaller(a, b) if "min" in operator_name(node) else _larger(a, b)


@rule("cumsum sum")
def _summed(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    own, shape = bounds.of(arguments["self"]).whole(), arguments["self"].meta["val"].shape
    dims = arguments.get("dim")
    every = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    count = math.prod(expression_of(shape[d]) for d in every) if len(shape) else 1
    found = times(own, number(count))
    if operator_name(node) == "cumsum":  # of one number, or of more
        found = join([inexact(found), inexact(own)]).whole()
    if node.meta["val"].dtype.is_floating_point:
        return Interval(slack(found.low, -1), slack(found.high, 1))
    return found


@rule("floor ceil round")
def _to_integers(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("decimals"):
        return UNKNOWN
    own, name = bounds.of(arguments["self"]).whole(), operator_name(node)
    if name == "floor":
        return intervals.floored(own)
    if name == "ceil":
        return intervals.raised(own)
    half = number(0.5)
    return Interval(intervals.raised(plus(own, minus(half))).low, intervals.floored(plus(own, half)).high)


@rule("trunc fix")
def _truncated(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return intervals.truncated(bounds.of(arguments["self"]).whole())


_FIXED_RANGES: dict[str, Interval] = {
    "sigmoid softmax _softmax hardsigmoid softmax_int": Interval(0, 1 + SLACK),
    "tanh erf sin cos": Interval(-1 - SLACK, 1 + SLACK),
    "sign sgn": Interval(-1, 1),
    "relu6": Interval(0, 6),
    "exp exp2 sqrt": Interval(0, INFINITE),
    "one_hot eye bernoulli": Interval(0, 1),
}


@rule("relu")
def _rectified(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return clamped(bounds.of(arguments["self"]), 0, None)


for _names, _range in _FIXED_RANGES.items():
    rule(_names)(lambda bounds, node, arguments, found=_range: found)  # type: ignore[misc]
