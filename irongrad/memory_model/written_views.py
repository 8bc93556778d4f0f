"""Transposes and slices that IREE writes to memory, instead of folding them into the kernel that reads them.

With data tiling, IREE 3.13.0 packs the operands of contractions in kernels of their own. A concatenation copies each of
its parts. Neither fuses with operations that move elements, except that a packing fuses with a transpose.

* A transpose is written if it is cut into slices, or is part of a concatenation.
* A transpose of four dimensions or more is written if contractions pack it in several ways: a packing fuses only with a
  value that it alone reads.
* A transpose of three dimensions or more that moves the first one is written if a contraction reads it.
* A slice whose elements are not contiguous is written if a contraction reads it.
* A transpose of a concatenation is written if it is a result: the concatenation has memory of its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.movements import Movement, operators
from irongrad.sizes.symbols import has_symbols

aten = torch.ops.aten

_RESHAPES: frozenset[Any] = operators(Movement.COPY | Movement.RESHAPE) | {operator.getitem}
CUTS: frozenset[Any] = operators(Movement.CUT)
TRANSPOSES: frozenset[Any] = operators(Movement.TRANSPOSE)
_JOINS: frozenset[Any] = operators(Movement.JOIN)

VIEWS = _RESHAPES | CUTS | TRANSPOSES | operators(Movement.SPLIT)

CONTRACTIONS: frozenset[Any] = frozenset({aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default})


def is_written_out(node: Node) -> bool:
    """Whether IREE writes the view `node` to memory of its own."""
    if node.target in TRANSPOSES and moves(node):
        readers = list(_readers(node))
        whole = is_join(joined(node.all_input_nodes[0]))
        return (
            sum(r.target in CUTS for r in readers) > 1
            or any(map(is_join, readers))
            or (whole and any(r.op == "output" for r in readers))
            or (_puts_another_first(node) and any(r.target in CONTRACTIONS for r in readers))
            or (node.meta["val"].ndim > 3 and _packed_in_several_ways(node))
        )
    if node.target in CUTS and not _is_contiguous(node):
        return any(r.target in CONTRACTIONS for r in _readers(node, _RESHAPES | TRANSPOSES))
    return False


def _puts_another_first(node: Node) -> bool:
    """Whether a transpose of three or more dimensions puts another dimension first."""
    order = order_of(node)
    return node.meta["val"].ndim > 2 and len(order) > 0 and order[0] != min(order)


def _packed_in_several_ways(node: Node) -> bool:
    """Whether contractions read different views of `node`, or one view as left and as right operand."""
    operands: set[tuple[Node, int]] = set()
    stack = [node]
    while stack:
        view = stack.pop()
        for user in view.users:
            if user.target in _RESHAPES | TRANSPOSES:
                stack.append(user)
            elif user.target in CONTRACTIONS:
                operands |= {(view, side) for side, operand in enumerate(user.args[-2:]) if operand is view}
    return len(operands) > 1


def _readers(node: Node, views: frozenset[Any] = _RESHAPES) -> Iterator[Node]:
    """The nodes that read `node`, directly or through `views`."""
    for user in node.users:
        if user.target in views:
            yield from _readers(user, views)
        else:
            yield user


def is_join(node: Node) -> bool:
    """Whether `node` is a concatenation that is built in memory, part by part."""
    return node.target in _JOINS and not is_rotation(node)


def is_in_place(node: Node) -> bool:
    """Whether the value of `node` is built by copies into its memory."""
    return is_join(node) or is_joined_anew(node) or node.target is aten.constant_pad_nd.default


def is_rotation(node: Node) -> bool:
    """Whether `node` concatenates the two halves of a value, the first part negated, as rotary embeddings do.

    `RaiseSpecialOps.cpp` turns it into one elementwise operation.
    """
    parts = node.all_input_nodes
    if node.target is not aten.cat.default or len(parts) != 2 or parts[0].target is not aten.neg.default:
        return False
    halves = parts[0].all_input_nodes[0], parts[1]
    last = dim_of(node) == node.meta["val"].ndim - 1
    return last and all(_is_cut(h) for h in halves) and joined(halves[0]) is joined(halves[1])


def _is_cut(node: Node) -> bool:
    return node.target in CUTS or node.target is operator.getitem


def joined(node: Node) -> Node:
    """The node that `node` reshapes, found through all reshapes."""
    while node.target in _RESHAPES:
        node = node.all_input_nodes[0]
    return node


def is_joined_anew(node: Node) -> bool:
    """Whether `node` reshapes a concatenation, and IREE rebuilds the concatenation for it from reshaped parts.

    It does so if the reshape divides a dimension other than the concatenated one: BubbleUpExpandShapes.cpp moves the
    reshape to the parts. Sizes that are known only when a step runs are not compared: that would fix them.
    """
    if node.target not in _RESHAPES or has_symbols(node.meta["val"]) or is_joined_anew(node.all_input_nodes[0]):
        return False
    whole = joined(node)
    return is_join(whole) and _divides_another(whole, node)


def forms_of(node: Node) -> Iterator[Node]:
    """The reshapes of the concatenation `node` for which IREE rebuilds it."""
    if is_join(node):
        stack = list(node.users)
        while stack:
            user = stack.pop()
            if user.target in _RESHAPES:
                if is_joined_anew(user):
                    yield user
                else:
                    stack.extend(user.users)


def _divides_another(whole: Node, form: Node) -> bool:
    """Whether `form` divides a dimension of the concatenation `whole` other than the concatenated one."""
    shape = whole.meta["val"].shape
    dim = dim_of(whole)
    inner = math.prod(shape[dim + 1 :])
    divided = strides_of(form.meta["val"].shape) - strides_of(shape)
    return any(not inner < stride < inner * shape[dim] for stride in divided)


def strides_of(shape: torch.Size) -> set[int]:
    """For each dimension, the number of elements in it and in the dimensions after it together; and 1."""
    return {shape[i:].numel() for i in range(len(shape) + 1)}


def dim_of(node: Node) -> int:
    """The dimension along which `node` concatenates its parts."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % int(node.meta["val"].ndim)


def is_cut_up(node: Node) -> bool:
    """Whether `node` has several readers, and one of them is a slice.

    A single slice is computed in place of `node`: `BubbleUpExpandShapes.cpp` (`BubbleUpExtract`) moves a slice before
    a value that has no other reader.
    """
    readers = list(_readers(node))
    return len(readers) > 1 and any(r.target in CUTS for r in readers)


def moves(node: Node) -> bool:
    """Whether a transpose changes the order of elements; dimensions of size 1 do not count."""
    order = order_of(node)
    return order != sorted(order)


def order_of(node: Node) -> list[int]:
    """The source's dimensions in the order that a transpose gives them, without dimensions of size 1."""
    shape = node.all_input_nodes[0].meta["val"].shape
    dims = list(range(len(shape)))
    args: tuple[Any, ...] = node.args
    if node.target is aten.permute.default:
        dims = [d % len(shape) for d in args[1]]
    else:
        one, other = (-2, -1) if node.target is aten.t.default else args[1:3]
        if len(shape) > 1:
            dims[one], dims[other] = dims[other], dims[one]
    return [d for d in dims if shape[d] > 1]


def _is_contiguous(node: Node) -> bool:
    """Whether a slice is contiguous in its source: all dimensions before the sliced one have size 1."""
    args: tuple[Any, ...] = node.args
    source = node.all_input_nodes[0].meta["val"]
    dim = (args[1] if len(args) > 1 else 0) % source.ndim
    step = args[4] if node.target is aten.slice.Tensor and len(args) > 4 else 1
    whole = source.numel() == node.meta["val"].numel()
    return whole or (step == 1 and all(size == 1 for size in source.shape[:dim]))
