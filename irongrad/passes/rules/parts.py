"""Rules for parts of joined tensors: rows of a stack, slices and splits of a concatenation.

An unrolled loop stacks the values that its steps save, and its backward takes the stack apart. With these rules, a node
that needs one part reads it directly. A node that needs the whole keeps the stack.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.passes.rules.patterns import Expression, Rule, family
from irongrad.passes.rules.views import same_elements, select, shape_of, slice_

aten = torch.ops.aten

cat = family(aten.cat.default)
stack = family(aten.stack.default)
split = family(aten.split_with_sizes.default)
item = family(operator.getitem)


def bounds(x: Node, d: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Return the first position of a slice of `x`, and the position after its last."""
    low, high, _ = slice(start, stop).indices(shape_of(x)[d])
    return low, max(low, high)


def sizes_of(parts: Sequence[Node], d: int) -> list[int]:
    """Return the size of each of `parts` along `d`; 0 for an empty part, whatever its rank."""
    return [shape_of(p)[d] if value_of(p).numel() else 0 for p in parts]


def holder(parts: Sequence[Node], d: int, start: int, stop: int) -> tuple[Node, int] | None:
    """Return the part that contains positions [start, stop) of the concatenation along `d`, and where it starts."""
    sizes = sizes_of(parts, d)
    for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        first = end - size
        if first <= start < stop <= end:
            return part, first
    return None


def row(parts: Sequence[Node], d: int, i: int, out: Node) -> Expression | Node:
    """Build row `i` of the concatenation of `parts` along `d`."""
    (whole,) = out.all_input_nodes
    place = i % shape_of(whole)[d]
    found = holder(parts, d, place, place + 1)
    assert found is not None
    return select(found[0], d, place - found[1])


def row_of_slice(x: Node, d: int, start: int | None, stop: int | None, i: int) -> Expression:
    """Build row `i` of a slice of `x`."""
    low, high = bounds(x, d, start, stop)
    return select(x, d, low + i % (high - low))


def within_one(parts: Sequence[Node], d: int, start: int | None, stop: int | None, out: Node) -> bool:
    """Whether a slice of a concatenation lies within one of its `parts`."""
    (whole,) = out.all_input_nodes
    return holder(parts, d, *bounds(whole, d, start, stop)) is not None


def slice_of_part(parts: Sequence[Node], d: int, start: int | None, stop: int | None, out: Node) -> Expression:
    """Build a slice of a concatenation along `d` as a slice of the part that contains it."""
    (whole,) = out.all_input_nodes
    low, high = bounds(whole, d, start, stop)
    found = holder(parts, d, low, high)
    assert found is not None
    return slice_(found[0], d, low - found[1], high - found[1])


def split_there(parts: Sequence[Node], d: int, sizes: Sequence[int]) -> bool:
    """Whether a split into `sizes` cuts at the borders of `parts`."""
    return sizes_of(parts, d) == list(sizes)


RULES = (
    Rule("row of a stack", lambda parts, d, i: select(stack(parts, d), d, i), lambda parts, i: parts[i], sized=True),
    Rule("row of a concatenation", lambda parts, d, i: select(cat(parts, d), d, i), row, sized=True),
    Rule("row of a slice", lambda x, d, start, stop, i: select(slice_(x, d, start, stop, 1), d, i), row_of_slice,
         sized=True),
    Rule("slice of a part", lambda parts, d, start, stop: slice_(cat(parts, d), d, start, stop, 1), slice_of_part,
         within_one, sized=True),
    Rule("split where it was joined", lambda parts, d, sizes, i: item(split(cat(parts, d), sizes, d), i),
         lambda parts, i: parts[i], split_there, sized=True),
    Rule("concatenation of one", lambda x: cat([x], ...), same_elements, sized=True),
)  # fmt: skip
