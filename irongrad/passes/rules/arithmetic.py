"""Rules of arithmetic, logic and casts.

They hold by IEEE 754-2019: x * 1, x / 1 and x - 0 are x for every x, and x + (-y) is x - y. Section 6.3 defines the
sign of a zero sum, for which x + 0 is not x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.nodes import is_zeros, value_of
from irongrad.passes.rules.patterns import Expression, Rule, family
from irongrad.passes.rules.views import expand, reshape, shape_of, used_once, view

aten, prims = torch.ops.aten, torch.ops.prims

add = family(aten.add.Tensor, commutative=True)
sub = family(aten.sub.Tensor)
mul = family(aten.mul.Tensor, aten.mul.Scalar, commutative=True)
div = family(aten.div.Tensor, aten.div.Scalar)
power = family(aten.pow.Tensor_Scalar)
neg = family(aten.neg.default)
where = family(aten.where.self)
eq = family(aten.eq.Scalar)
ne = family(aten.ne.Scalar)
invert = family(aten.bitwise_not.default, aten.logical_not.default)
both = family(aten.bitwise_and.Tensor, aten.logical_and.default, commutative=True)
cast = family(prims.convert_element_type.default)
index_put = family(aten.index_put.default)
copy = family(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


def is_boolean(x: Node) -> bool:
    """Whether `x` is a tensor of booleans, for which a bitwise operator is a logical one."""
    return bool(value_of(x).dtype is torch.bool)


def are_alike(x: Any, y: Node) -> bool:
    """Whether two values have one dtype.

    The rule x + -y does not hold for mixed dtypes: the negative of an unsigned byte is a large number, which x - y does
    not subtract. A number that is computed from sizes has no dtype.
    """
    return isinstance(x, Node) and getattr(value_of(x), "dtype", None) is value_of(y).dtype


def is_widening(x: Node, y: Any) -> bool:
    """Whether the dtype `y` represents every number of the dtype of `x`."""
    have = value_of(x).dtype
    if have.is_complex or y.is_complex:
        return False
    if have is torch.bool:
        return True
    if have.is_floating_point:
        return bool(y.is_floating_point and torch.promote_types(have, y) is y)
    if y.is_floating_point or y is torch.bool:
        return bool(torch.iinfo(have).bits < _PRECISION.get(y, 0))
    narrow, wide = torch.iinfo(have), torch.iinfo(y)
    return bool(wide.min <= narrow.min and narrow.max <= wide.max)


def square_of_view(x: Node, out: Node) -> Expression:
    """Build the square of `x` in the shape of `out`: IREE does not fuse a reshape between a product and its sum."""
    seen = view(x, shape_of(out))
    return mul(seen, seen)


def adds_to_zeros(x: Node, z: Node, out: Node) -> bool:
    """Whether `z` is zero, and `out` alone reads `x` and the rows added to `z`: then they are added to `x` in place."""
    return is_zeros(z) and x.op == "call_function" and all(used_once(n) for n in out.all_input_nodes)


# Bits of the significand; all integers with fewer bits are exact.
_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

RULES = (
    Rule("copy", lambda x: copy(x), lambda x: x),
    Rule("x * 1", lambda x: mul(x, 1), lambda x: x),
    Rule("x / 1", lambda x: div(x, 1), lambda x: x),
    Rule("x - 0", lambda x: sub(x, 0), lambda x: x),
    Rule("integer + 0", lambda x: add(x, 0), lambda x: x, lambda out: not value_of(out).is_floating_point()),
    Rule("x ** 1", lambda x: power(x, 1), lambda x: x),
    Rule("x ** 2", lambda x: power(x, 2), lambda x: mul(x, x)),
    Rule("x + -y", lambda x, y: add(x, neg(y)), lambda x, y: sub(x, y), are_alike),
    Rule("x if True else y", lambda x, y: where(True, x, y), lambda x: x),
    Rule("x if False else y", lambda x, y: where(False, x, y), lambda y: y),
    Rule("not x == number", lambda x, c: invert(eq(x, c)), lambda x, c: ne(x, c)),
    Rule("x and True", lambda x: both(x, True), lambda x: x, is_boolean),
    Rule("x + expanded", lambda x, y: add(x, expand(y, ...)), lambda x, y: add(y, x)),
    Rule("x * expanded", lambda x, y: mul(x, expand(y, ...)), lambda x, y: mul(y, x)),
    Rule("x / expanded", lambda x, y: div(x, expand(y, ...)), lambda x, y: div(x, y)),
    Rule("expanded if c else y", lambda c, x, y: where(c, expand(x, ...), y), lambda c, x, y: where(c, x, y)),
    Rule("x if c else expanded", lambda c, x, y: where(c, x, expand(y, ...)), lambda c, x, y: where(c, x, y)),
    Rule("expanded * number", lambda x, c: mul(expand(x, ...), c), lambda x, c, out: expand(mul(x, c), shape_of(out)),
         lambda c: not isinstance(c, Node), sized=True),
    Rule("view of a square", lambda x: reshape(mul(x, x), ...), square_of_view, lambda out: used_once(out.args[0]),
         sized=True),
    Rule("expanded / number", lambda x, c: div(expand(x, ...), c), lambda x, c, out: expand(div(x, c), shape_of(out)),
         lambda c: not isinstance(c, Node), sized=True),
    Rule("x + rows added to zeros", lambda x, z, i, v: add(x, index_put(z, i, v, True)),
         lambda x, i, v: index_put(x, i, v, True), adds_to_zeros, exact=False),
    Rule("cast to the same", lambda x, d: cast(x, d), lambda x: x),
    Rule("cast of a widening cast", lambda x, c, d: cast(cast(x, c), d), lambda x, d: cast(x, d),
         lambda x, c: is_widening(x, c)),
)  # fmt: skip
