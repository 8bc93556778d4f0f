"""Reshapes of symbolic sizes, rewritten to join and split dimensions.

torch-mlir 20261001 pairs the unknown sizes of a `view` one by one. In a view of [B, T, 16] as [B * T, 16], it silently
takes B * T for B, and T for 1. It lowers `prims.collapse` and `unflatten` correctly.
tests/pipeline/iree/test_toolchain_sizes.py tells when the `view` is fixed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import FloorDiv

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.nodes import meta_of
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.sizes.symbols import has_symbols

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

# The lengths of two runs of adjacent dimensions, of the input and of the result, with the same number of elements.
Group = tuple[int, int]


def joined_and_split(graph: GraphModule) -> GraphModule:
    """A copy of `graph` in which every reshape of symbolic sizes is made of joins and splits of dimensions.

    Raises:
        UnsupportedOpError: a reshape neither joins nor splits dimensions; with the user's line.
    """
    graph = copy.deepcopy(graph)
    for node in list(graph.graph.nodes):
        if node.target in _RESHAPES and (has_symbols(node.meta["val"]) or has_symbols(node.args[0].meta["val"])):
            _rewrite(graph.graph, node)
    graph.recompile()
    return graph


def _rewrite(graph: Graph, node: Node) -> None:
    value: Node = node.args[0]
    before, after = value.meta["val"].shape, node.meta["val"].shape
    groups = _groups(list(map(_expression, before)), list(map(_expression, after)))
    if groups is None:
        raise UnsupportedOpError(
            f"{line_of(node)}: {node.target} from {tuple(before)} to {tuple(after)} cannot be compiled for every size: "
            "it neither joins dimensions nor splits them. Give buckets=, or reshape in two steps"
        )
    sizes = _sizes(graph, node)
    with graph.inserting_before(node):
        place = 0
        for old_rank, new_rank in groups:
            if old_rank > 1 or not new_rank:
                shape = [
                    *value.meta["val"].shape[:place],
                    *_joined_size(value, place, old_rank),
                    *value.meta["val"].shape[place + old_rank :],
                ]
                value = _call(graph, node, shape, *_join(value, place, old_rank))
            if new_rank > 1 or not old_rank:
                shape = [*after[: place + new_rank], *value.meta["val"].shape[place + bool(old_rank) :]]
                value = _call(graph, node, shape, *_split(value, place, sizes[place : place + new_rank], old_rank))
            place += new_rank
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _joined_size(value: Node, place: int, old_rank: int) -> list[Any]:
    """The size that replaces joined dimensions; none if a single dimension, of size 1, is squeezed."""
    return [math.prod(value.meta["val"].shape[place : place + old_rank])] if old_rank > 1 else []


def _join(value: Node, place: int, old_rank: int) -> tuple[Any, ...]:
    if old_rank == 1:
        return aten.squeeze.dim, value, place
    return torch.ops.prims.collapse.default, value, place, place + old_rank - 1


def _split(value: Node, place: int, sizes: Sequence[Any], old_rank: int) -> tuple[Any, ...]:
    if not old_rank:
        return aten.unsqueeze.default, value, place
    return aten.unflatten.int, value, place, list(sizes)


def _call(graph: Graph, node: Node, shape: Sequence[Any], operator: Any, *args: Any) -> Node:
    made = graph.call_function(operator, args)
    made.meta = {**meta_of(node), "val": node.meta["val"].new_empty(list(shape))}
    return made


def _sizes(graph: Graph, node: Node) -> list[Any]:
    """The sizes of the result, as `node` takes them.

    A size of -1 becomes a number, or an earlier node whose value is that size.
    """
    sizes = list(node.args[1])
    for d, size in enumerate(sizes):
        if isinstance(size, int) and size < 0:
            wanted = node.meta["val"].shape[d]
            known = (n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt) and n < node)
            same = (n for n in known if _expression(n.meta["val"]) == _expression(wanted))
            sizes[d] = wanted if isinstance(wanted, int) else next(same, size)
    return sizes


def _expression(size: Any) -> sympy.Expr:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    return size.node.expr.replace(FloorDiv, _quotient)


def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr:
    """The quotient, without a FloorDiv if the division is exact; PyTorch writes a FloorDiv for a size of -1."""
    ratio = sympy.cancel(whole / part)
    return ratio if sympy.denom(ratio) == 1 else FloorDiv(whole, part)


def _groups(before: Sequence[sympy.Expr], after: Sequence[sympy.Expr]) -> list[Group] | None:
    """The shortest runs of dimensions with equal products on both sides; None if the dimensions have no such runs."""
    groups: list[Group] = []
    i = j = 0
    while i < len(before) or j < len(after):
        runs = itertools.product(range(len(before) - i + 1), range(len(after) - j + 1))
        equal = (
            (a, b)
            for a, b in sorted(runs, key=lambda run: (sum(run), run))
            if a + b and sympy.expand(sympy.prod(before[i : i + a]) - sympy.prod(after[j : j + b])) == 0
        )
        if (found := next(equal, None)) is None:
            return None
        groups.append(found)
        i, j = i + found[0], j + found[1]
    return groups
