"""Reshapes of symbolic sizes, as dimensions that are joined and dimensions that are split.

torch-mlir 20261001 pairs the unknown sizes of a `view` one by one: that of [B, T, 16] as [B * T, 16] takes B * T for B,
and T for 1, without a word. What it makes of `prims.collapse` and `unflatten` is right.
tests/pipeline/iree/test_toolchain_sizes.py tells when the first is.
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

# Of the dimensions of the input and of the result: how many that come next have the same number of elements.
Group = tuple[int, int]


def joined_and_split(graph: GraphModule) -> GraphModule:
    """A copy of `graph` in which every reshape of symbolic sizes is of joined and split dimensions.

    Raises:
        UnsupportedOpError: one that is neither, with the user's line.
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
        for taken, made in groups:
            if taken > 1 or not made:
                shape = [
                    *value.meta["val"].shape[:place],
                    *_joined(value, place, taken),
                    *value.meta["val"].shape[place + taken :],
                ]
                value = _call(graph, node, shape, *_join(value, place, taken))
            if made > 1 or not taken:
                shape = [*after[: place + made], *value.meta["val"].shape[place + bool(taken) :]]
                value = _call(graph, node, shape, *_split(value, place, sizes[place : place + made], taken))
            place += made
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _joined(value: Node, place: int, taken: int) -> list[Any]:
    """The size of joined dimensions; a single one, which is 1, goes."""
    return [math.prod(value.meta["val"].shape[place : place + taken])] if taken > 1 else []


def _join(value: Node, place: int, taken: int) -> tuple[Any, ...]:
    if taken == 1:
        return aten.squeeze.dim, value, place
    return torch.ops.prims.collapse.default, value, place, place + taken - 1


def _split(value: Node, place: int, sizes: Sequence[Any], taken: int) -> tuple[Any, ...]:
    if not taken:
        return aten.unsqueeze.default, value, place
    return aten.unflatten.int, value, place, list(sizes)


def _call(graph: Graph, node: Node, shape: Sequence[Any], operator: Any, *args: Any) -> Node:
    made = graph.call_function(operator, args)
    made.meta = {**meta_of(node), "val": node.meta["val"].new_empty(list(shape))}
    return made


def _sizes(graph: Graph, node: Node) -> list[Any]:
    """The sizes of the result as `node` has them; one that it leaves open is a number, or that of an earlier node."""
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
    """Without a division where it is one without a rest, as PyTorch has it for a size that a reshape leaves open."""
    ratio = sympy.cancel(whole / part)
    return ratio if sympy.denom(ratio) == 1 else FloorDiv(whole, part)


def _groups(before: Sequence[sympy.Expr], after: Sequence[sympy.Expr]) -> list[Group] | None:
    """The shortest runs of dimensions on both sides that have equal products; None where there are no such runs."""
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
