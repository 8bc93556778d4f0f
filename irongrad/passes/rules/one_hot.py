"""Rules for the class of each row: the log-probability that a loss reads, and the sum of a row of slopes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.nodes import is_zeros, value_of
from irongrad.operators.decompositions.reductions import LONGEST_CHAIN
from irongrad.passes.rules.arithmetic import add, both, mul, sub, where
from irongrad.passes.rules.patterns import Bindings, Expression, Rule, Variable, family, match
from irongrad.passes.rules.views import counts_up, pad, reshape, shape_of, sum_, view

aten = torch.ops.aten

gather = family(aten.gather.default)
is_place = family(aten.eq.Tensor)
at_least = family(aten.ge.Scalar)
below = family(aten.lt.Scalar)

# A value at the class of each row, and zeros elsewhere: the gradient of a loss (operators/decompositions/loss.py).
_PLACES = is_place(Variable("index"), reshape(Variable("places"), ...))
_ONE_HOT = where(both(_PLACES, Variable("valid")), Variable("value"), Variable("zero"))
# One number more for all classes of a row: the gradient of a loss with label smoothing.
_SMOOTHED = add(Variable("others"), _ONE_HOT)


def one_hot_under(total: Node) -> Bindings | None:
    """The variables of `_ONE_HOT` or `_SMOOTHED`, if `total` has the sum of each of its rows; None otherwise.

    The sum may be one in chunks, which are padded with zeros (operators/decompositions/reductions.py).
    """
    rows, node = value_of(total).numel(), total
    while node.target in (*sum_.operators, *view.operators, *pad.operators):
        keeps_rows = shape_of(node)[:1] == [rows] and shape_of(node.args[0])[:1] == [rows]
        if not keeps_rows or (node.target in pad.operators and not _pads_rows(node)):
            return None
        node = node.args[0]
    bound = match(_ONE_HOT, node, {}) or match(_SMOOTHED, node, {})
    if bound is None or value_of(node).ndim != 2:
        return None
    of_rows = all(_width(x) == 1 for name, x in bound.items() if name not in ("places", "zero"))
    of_classes = counts_up(bound["places"]) and _width(bound["places"]) == shape_of(node)[1]
    return bound if of_rows and of_classes and is_zeros(bound["zero"]) else None


def _pads_rows(node: Node) -> bool:
    """Whether a node adds zeros to the ends of rows alone."""
    _, padding, *value = node.args
    return not any(padding[2:]) and value in ([], [0], [0.0])


def _width(x: Any) -> int:
    """The number of columns of a tensor; one for a number."""
    return shape_of(x)[-1] if isinstance(x, Node) and shape_of(x) else 1


def value_at_class(out: Node) -> Expression:
    """Build the sum of each row, as one element of the row is not zero, or none if its class is out of range.

    A number that all elements of a row have more is added once for each class.
    """
    bound = one_hot_under(out)
    assert bound is not None
    index, classes = bound["index"], _width(bound["places"])
    is_one = both(both(at_least(index, 0), below(index, classes)), bound["valid"])
    one = where(is_one, bound["value"], bound["zero"])
    return view(add(one, mul(bound["others"], classes)) if "others" in bound else one, shape_of(out))


def reads_little(b: Any, d: int, i: Node, out: Node) -> bool:
    """Whether `b` has one number for each row along `d`, and few elements are gathered from each long row."""
    of_rows = shape_of(i)
    of_rows[d] = 1
    (difference, *_) = out.all_input_nodes
    # IREE takes a row that it adds in one chain through a whole softmax in one kernel. It does not write the difference
    # to memory there, and a gather from its operand would be one more kernel.
    is_long = shape_of(difference)[d] > LONGEST_CHAIN and 4 * math.prod(shape_of(i)) <= value_of(difference).numel()
    return isinstance(b, Node) and shape_of(b) == of_rows and is_long


RULES = (
    Rule("sum of a one-hot row", lambda x: sum_(x, ...), value_at_class, lambda out: one_hot_under(out) is not None,
         exact=False, sized=True),
    Rule("gather of x - rows", lambda x, b, d, i: gather(sub(x, b), d, i), lambda x, b, d, i: sub(gather(x, d, i), b),
         reads_little, sized=True),
)  # fmt: skip
