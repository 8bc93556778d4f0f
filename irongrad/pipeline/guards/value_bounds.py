"""Interval analysis of an exported graph: the least and the largest value of each node.

Constants have the bounds of their values, inputs and parameters those of their dtype. Sizes may be symbols. Whatever a
rule does not know has no bounds. An integer that a loop hands on from one iteration to the next has bounds that hold at
first, and again after an iteration from a value within them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch.fx import Node

from irongrad.graph.flat_graph import Carry
from irongrad.graph.movements import OF_ONE_TENSOR, Movement, names
from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.index_uses import arguments_of, operator_name
from irongrad.pipeline.guards.intervals import INFINITE, UNKNOWN, Interval, clamped, join, minus, number, plus, times

_DEEPEST = 150  # further operators up from an index, a node has no bounds

# How many carries have assumed bounds at once.
_MOST_ASSUMED = 2

# A function whose values have bounds in exact arithmetic may exceed them by rounding.
_SLACK = 1e-5


class Bounds:
    """The bounds of the nodes of a graph, computed when they are asked for.

    Args:
        known: the bounds of some nodes: constants, and inputs with a range.
        origins: the nodes that compute a value, inside or outside of a region.
        unknown: nodes without bounds, because something writes into their memory.
        carries: the values that loops hand on.
    """

    def __init__(
        self,
        known: Mapping[Node, Interval],
        origins: Callable[[Any], list[Any]] = lambda value: [value],
        unknown: Collection[Node] = (),
        carries: Mapping[Node, Carry] | None = None,
    ) -> None:
        self._found: dict[Node, Interval] = dict(known)
        self._origins = origins
        self._unknown = unknown
        self._carries = carries or {}
        self._assumed = 0
        self._depth = 0

    def of(self, value: Any) -> Interval:
        """Return the bounds of a node or a number."""
        if isinstance(value, Node):
            return join(self._of_node(origin) for origin in self._origins(value))
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
        if name in _SEES_THROUGH:
            return self.is_permutation(node.args[0], size)
        if node.target is operator.getitem and node.args[1] == 1:
            sorts = [o for o in self._origins(node.args[0]) if isinstance(o, Node)]
            name = operator_name(sorts[0]) if len(sorts) == 1 else ""
        is_one = name in ("argsort", "sort", "randperm")
        return is_one and expression_of(node.meta["val"].shape[0]) == expression_of(size)

    def _of_node(self, node: Any) -> Interval:
        if not isinstance(node, Node):
            return self.of(node)
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
        rule = _RULES.get(operator_name(node)) if isinstance(node.target, torch._ops.OpOverload) else None
        found = rule(self, node, arguments_of(node)) if rule is not None else UNKNOWN
        return _representable(found, value.dtype)

    def _handed_on(self, node: Node, dtype: torch.dtype) -> Interval:
        """The bounds of a carry: they hold at first, and again after an iteration."""
        every = _representable(UNKNOWN, dtype)
        if dtype.is_floating_point or dtype.is_complex or self._assumed == _MOST_ASSUMED:
            return every
        start, widest = self.of(self._carries[node].initial), self._after(node, every)
        if -INFINITE in (start.low, -start.high):
            return _representable(widest, dtype)
        kept = Interval(
            widest.low if widest.low != -INFINITE else start.low, widest.high if widest.high != INFINITE else start.high
        )
        made = self._after(node, kept)
        if intervals.at_most(kept.low, made.low) and intervals.at_most(made.high, kept.high):
            return kept
        return self._counted(node, start) or _representable(widest, dtype)

    def _counted(self, node: Node, start: Interval) -> Interval | None:
        """The bounds of a counter, to which each of a known number of iterations adds something; None if it is none."""
        carry = self._carries[node]
        handed = _plain(carry.handed)
        if carry.trips is None or not isinstance(handed, Node) or operator_name(handed) != "add":
            return None
        step = self.of(handed.args[1])
        is_fixed = isinstance(step.low, int) and step.low == step.high and not handed.kwargs
        if _plain(handed.args[0]) is not node or not is_fixed:
            return None
        turns = max(carry.trips - 1, 0)
        return Interval(start.low + min(0, step.low) * turns, start.high + max(0, step.high) * turns)

    def _after(self, node: Node, assumed: Interval) -> Interval:
        """The bounds of a carry at the start of an iteration, if they were `assumed` at the start of the one before."""
        carry, found = self._carries[node], dict(self._found)
        self._found[node] = assumed
        self._assumed += 1
        made = join([self.of(carry.initial), self.of(carry.handed)])
        if carry.asked is not None:
            made = _limited(self, made, _comparisons(carry.condition, carry.asked, holds=True))
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
            made = self.of(arguments["self"]) if place == 0 else _places(found[0], arguments)
        elif name in _POOLS_WITH_PLACES:
            sizes = arguments["self"].meta["val"].shape[-_POOLS_WITH_PLACES[name] :]
            made = self.of(arguments["self"]) if place == 0 else _below(math.prod(sizes))
        elif name in names(Movement.SPLIT):
            made = _inexact(self.of(arguments["self"]))
        elif name in ("meshgrid", "broadcast_tensors"):
            made = self.of(arguments["tensors"][place])
        else:
            made = UNKNOWN
        return _representable(made, value.dtype)


def expression_of(size: Any) -> Any:
    """A size as a number or an expression."""
    return sympy.sympify(size.node.expr) if isinstance(size, torch.SymInt) else size


def constant_bounds(tensor: torch.Tensor) -> Interval:
    """Return the bounds of a tensor whose values are known."""
    if tensor.numel() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
        return UNKNOWN
    values = tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64)
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
    elif dtype is torch.int64 and any(_is_symbol(e) for e in ends):
        return found  # sizes are far below the largest integer
    return UNKNOWN if dtype is torch.int64 else Interval(info.min, info.max)


def _is_symbol(end: Any) -> bool:
    return isinstance(end, sympy.Basic) and bool(end.free_symbols)


_FLOATS: dict[torch.dtype, Any] = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def _rounded_to(found: Interval, dtype: torch.dtype) -> Interval:
    """Ends that hold the numbers before and after rounding; compiled code may leave out a rounding."""
    low, high = _nearest(found.low, dtype, -1), _nearest(found.high, dtype, 1)
    return Interval(intervals.lower([low, found.low]), intervals.higher([high, found.high]), found.points, found.exact)


def _nearest(end: Any, dtype: torch.dtype, sign: int) -> Any:
    if _is_symbol(end) or abs(end) == INFINITE:
        return end
    if dtype not in _FLOATS:  # bfloat16 has 8 bits
        return float(end) + sign * abs(float(end)) * 2**-8
    with np.errstate(over="ignore"):
        return float(_FLOATS[dtype](float(end)))


# --- the rules ----------------------------------------------------------------------------------------------------

_Rule = Callable[[Bounds, Node, dict[str, Any]], Interval]
_RULES: dict[str, _Rule] = {}


def _rule(operators: str) -> Callable[[_Rule], _Rule]:
    def add(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(operators.split(), function))
        return function

    return add


def _inexact(found: Interval) -> Interval:
    return Interval(found.low, found.high, found.points)


def _below(size: Any) -> Interval:
    """The places in a dimension."""
    return Interval(0, expression_of(size) - 1)


# Operators that return values, and their places in a dimension.
WITH_PLACES = frozenset(["sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin"])
_POOLS_WITH_PLACES = {f"{kind}max_pool{n}d_with_indices": n for kind in ("", "fractional_") for n in (1, 2, 3)} | {
    f"{kind}max_pool{n}d": n for kind in ("adaptive_", "fractional_") for n in (1, 2, 3)
}


def _places(node: Node, arguments: Mapping[str, Any]) -> Interval:
    shape, dim = arguments["self"].meta["val"].shape, arguments.get("dim")
    if dim is None:
        return _below(math.prod(shape))
    return _below(shape[dim]) if len(shape) else number(0)


@_rule(" ".join(names(OF_ONE_TENSOR & ~(Movement.CUT | Movement.SPLIT) | Movement.CAST | Movement.OVERWRITE)))
def _same(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    source = node.args[1] if operator_name(node) in names(Movement.OVERWRITE) else node.args[0]
    found = bounds.of(source)
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if after is torch.bool:
        return found if before is torch.bool else Interval(0, 1)
    if before.is_floating_point and not after.is_floating_point:
        return intervals.truncated(found.whole())
    return found


@_rule(" ".join(names(Movement.CUT)) + " narrow diagonal unfold as_strided masked_select max_pool2d max_pool1d")
def _cut(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return _inexact(bounds.of(node.args[0]))


@_rule("gather index index_select take take_along_dim _unsafe_index")
def _taken(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return _inexact(bounds.of(arguments["self"]))


@_rule("embedding")
def _looked_up(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return _inexact(bounds.of(arguments["weight"]))


@_rule("repeat_interleave")
def _repeated(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    if "self" in arguments:
        return _inexact(bounds.of(arguments["self"]))
    return _below(arguments["repeats"].meta["val"].numel())


@_rule("amax amin max min median nanmedian mode mean cummax cummin")
def _of_its_elements(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    own = bounds.of(arguments["self"]).whole()
    if isinstance(arguments.get("other"), Node):  # max.other and min.other
        return _least_or_largest(bounds, node, arguments)
    if operator_name(node) == "mean":
        return Interval(_slack(own.low, -1), _slack(own.high, 1))
    return _inexact(own)


def _slack(end: Any, sign: int) -> Any:
    if _is_symbol(end) or abs(end) == INFINITE:
        return sign * INFINITE
    return end + sign * _SLACK * abs(end)


@_rule("cat stack concat concatenate hstack vstack")
def _joined(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return join(bounds.of(t) for t in arguments["tensors"])


@_rule("constant_pad_nd pad")
def _padded(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("mode", "constant") != "constant":
        return _inexact(bounds.of(arguments["self"]))
    return join([bounds.of(arguments["self"]), bounds.of(arguments["value"] or 0)])


@_rule("diag_embed slice_backward select_backward tril triu")
def _among_zeros(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return join([_inexact(bounds.of(node.args[0])), number(0)])


@_rule("diagonal_scatter select_scatter slice_scatter scatter index_put index_copy masked_scatter index_fill put")
def _written(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("accumulate") or arguments.get("reduce"):
        return UNKNOWN
    written = next(arguments[n] for n in ("src", "values", "source", "value") if n in arguments)
    if _replaces_all(bounds, node, arguments):
        return _inexact(bounds.of(written))
    return join([_inexact(bounds.of(arguments["self"])), _inexact(bounds.of(written))])


def _replaces_all(bounds: Bounds, node: Node, arguments: Mapping[str, Any]) -> bool:
    """Whether every element is written: the index is a permutation, as in `inverse[order] = torch.arange(n)`."""
    found = arguments.get("indices", [arguments.get("index")])
    whole = arguments["self"].meta["val"].shape
    return len(found) == 1 and len(whole) == 1 and bounds.is_permutation(found[0], whole[0])


@_rule("masked_fill")
def _filled(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    own = _refined(bounds, arguments["mask"], arguments["self"], holds=False)
    return join([_inexact(own), bounds.of(arguments["value"])])


@_rule("where")
def _where(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    if "self" not in arguments:
        return UNKNOWN
    chosen = _refined(bounds, arguments["condition"], arguments["self"], holds=True)
    other = _refined(bounds, arguments["condition"], arguments["other"], holds=False)
    return join([_inexact_unless_number(chosen), _inexact_unless_number(other)])


def _inexact_unless_number(found: Interval) -> Interval:
    return found if found.is_number else _inexact(found)


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _refined(bounds: Bounds, condition: Any, value: Any, *, holds: bool) -> Interval:
    """The bounds of `value` where `condition` holds, or where it does not."""
    found = bounds.of(value)
    if not isinstance(value, Node) or value.meta["val"].dtype.is_floating_point:
        return found
    return _limited(bounds, found, _comparisons(condition, value, holds=holds))


def _limited(bounds: Bounds, found: Interval, comparisons: Sequence[tuple[str, Any]]) -> Interval:
    """The part of an interval for which comparisons hold."""
    for name, limit in comparisons:
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


def _comparisons(condition: Any, value: Node, *, holds: bool) -> list[tuple[str, Any]]:
    """The comparisons of `value` that are true where `condition` holds, or where it does not."""
    if not isinstance(condition, Node) or not isinstance(condition.target, torch._ops.OpOverload):
        return []
    name, arguments = operator_name(condition), list(condition.args)
    if name in ("logical_not", "bitwise_not"):
        return _comparisons(arguments[0], value, holds=not holds)
    if name in (("logical_and", "bitwise_and", "mul", "__and__") if holds else ("logical_or", "bitwise_or", "__or__")):
        return [found for a in arguments[:2] for found in _comparisons(a, value, holds=holds)]
    if name in _SEES_THROUGH:
        return _comparisons(arguments[0], value, holds=holds)
    if name not in _NEGATED:
        return []
    left, right = arguments[:2]
    name = name if holds else _NEGATED[name]
    if _plain(left) is _plain(value):
        return [(name, right)]
    return [(_MIRRORED[name], left)] if _plain(right) is _plain(value) else []


_SEES_THROUGH = frozenset({"alias", "clone", "detach", "lift_fresh_copy"})


def _plain(value: Any) -> Any:
    while isinstance(value, Node) and operator_name(value) in _SEES_THROUGH:
        value = value.args[0]
    return value


@_rule("add sub rsub subtract")
def _added(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    left, right = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    scale = bounds.of(arguments.get("alpha", 1))
    name = operator_name(node)
    if name == "rsub":
        left, right = right, left
        return plus(left, minus(times(right, scale)) if scale != number(1) else minus(right))
    right = right if scale == number(1) else times(right, scale)
    return plus(left, right if name == "add" else minus(right))


@_rule("mul multiply")
def _multiplied(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return times(bounds.of(arguments["self"]), bounds.of(arguments["other"]))


@_rule("square")
def _squared(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    size = _absolute(bounds, node, arguments)
    return times(size, size)


@_rule("neg negative")
def _negated(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return minus(bounds.of(arguments["self"]))


@_rule("abs absolute")
def _absolute(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    own = bounds.of(arguments["self"]).whole()
    if intervals.at_most(0, own.low):
        return own
    return Interval(0, intervals.higher([-own.low, own.high]))


@_rule("div divide true_divide floor_divide")
def _divided(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    made = intervals.quotient(bounds.of(arguments["self"]), bounds.of(arguments["other"]))
    mode = "floor" if operator_name(node) == "floor_divide" else arguments.get("rounding_mode")
    if mode is None:
        return made
    return intervals.floored(made) if mode == "floor" else intervals.truncated(made)


@_rule("remainder fmod")
def _remainder(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    left, right = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    whole = not node.meta["val"].dtype.is_floating_point
    return intervals.remainder(left, right, like_divisor=operator_name(node) == "remainder", whole=whole)


@_rule("bitwise_and __and__")
def _bits_of_both(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    every = [bounds.of(arguments[n]).whole() for n in ("self", "other")]
    limits = [i.high for i in every if intervals.at_most(0, i.low)]
    if not limits:
        return UNKNOWN
    return Interval(0, limits[0] if len(limits) == 1 else intervals.cut_above(*limits))


@_rule("bitwise_or bitwise_xor __or__ __xor__")
def _bits_of_either(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    every = [bounds.of(arguments[n]).whole() for n in ("self", "other")]
    if any(_is_symbol(i.high) or i.high == INFINITE or not intervals.at_most(0, i.low) for i in every):
        return UNKNOWN
    return Interval(0, (1 << max(int(i.high).bit_length() for i in every)) - 1)


@_rule("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__")
def _shifted(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    own, by = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    if not by.is_number or not 0 <= by.low < 63:
        return UNKNOWN
    factor = number(1 << int(by.low))
    if "left" in operator_name(node) or "lshift" in operator_name(node):
        return times(own, factor)
    return intervals.floored(intervals.quotient(own, factor))


@_rule("clamp clip clamp_min clamp_max hardtanh")
def _clamped(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
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


@_rule("minimum maximum fmin fmax")
def _least_or_largest(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    a, b = bounds.of(arguments["self"]), bounds.of(arguments["other"])
    return _smaller(a, b) if "min" in operator_name(node) else _larger(a, b)


@_rule("cumsum sum")
def _summed(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    own, shape = bounds.of(arguments["self"]).whole(), arguments["self"].meta["val"].shape
    dims = arguments.get("dim")
    every = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    count = math.prod(expression_of(shape[d]) for d in every) if len(shape) else 1
    found = times(own, number(count))
    if operator_name(node) == "cumsum":  # of one number, or of more
        found = join([_inexact(found), _inexact(own)]).whole()
    if node.meta["val"].dtype.is_floating_point:
        return Interval(_slack(found.low, -1), _slack(found.high, 1))
    return found


@_rule("floor ceil round")
def _to_integers(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("decimals"):
        return UNKNOWN
    own, name = bounds.of(arguments["self"]).whole(), operator_name(node)
    if name == "floor":
        return intervals.floored(own)
    if name == "ceil":
        return intervals.raised(own)
    half = number(0.5)
    return Interval(intervals.raised(plus(own, minus(half))).low, intervals.floored(plus(own, half)).high)


@_rule("trunc fix")
def _truncated(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return intervals.truncated(bounds.of(arguments["self"]).whole())


_FIXED_RANGES: dict[str, Interval] = {
    "sigmoid softmax _softmax hardsigmoid softmax_int": Interval(0, 1 + _SLACK),
    "tanh erf sin cos": Interval(-1 - _SLACK, 1 + _SLACK),
    "sign sgn": Interval(-1, 1),
    "relu6": Interval(0, 6),
    "exp exp2 sqrt": Interval(0, INFINITE),
    "one_hot eye bernoulli": Interval(0, 1),
}
for _names, _range in _FIXED_RANGES.items():
    _rule(_names)(lambda bounds, node, arguments, found=_range: found)  # type: ignore[misc]


@_rule("relu")
def _rectified(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return clamped(bounds.of(arguments["self"]), 0, None)


@_rule("rand rand_like")
def _random(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    bits = {torch.float32: 24, torch.float64: 53}.get(node.meta["val"].dtype)
    return Interval(0, 1 - 2.0**-bits if bits else 1)


@_rule("randint randint_like random")
def _random_integers(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    return Interval(expression_of(low), expression_of(high) - 1) if high is not None else UNKNOWN


@_rule("randperm")
def _permutation(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["n"]) - 1)


@_rule("multinomial")
def _drawn(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return _below(arguments["self"].meta["val"].shape[-1])


@_rule("argmax argmin argsort")
def _place(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return _places(node, arguments)


@_rule("searchsorted")
def _searched(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["sorted_sequence"].meta["val"].shape[-1]))


@_rule("bucketize")
def _bucket(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["boundaries"].meta["val"].numel()))


@_rule("count_nonzero")
def _count(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["self"].meta["val"].numel()))


@_rule("zeros zeros_like new_zeros")
def _zeros(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return number(0)


@_rule("ones ones_like new_ones")
def _ones(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return number(1)


@_rule("full full_like new_full fill scalar_tensor")
def _constant(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    found = next(arguments[n] for n in ("fill_value", "value", "s") if n in arguments)
    made = bounds.of(found)
    return intervals.truncated(made) if not node.meta["val"].dtype.is_floating_point else made


@_rule("arange")
def _arange(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    value = node.meta["val"]
    first = expression_of(start)
    if value.dtype.is_floating_point or not isinstance(step, int) or isinstance(start, float):
        return UNKNOWN
    last = first + (expression_of(value.shape[0]) - 1) * step
    return Interval(*((first, last) if step > 0 else (last, first)), exact=True)


@_rule("tril_indices triu_indices")
def _triangle(bounds: Bounds, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, max(arguments["row"], arguments["col"], 1) - 1)
