"""Bounds of positions in a dimension: of `argmax`, of a sort, of a search, and of counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from irongrad.pipeline.guards.bound_rules.registry import Known, below, expression_of, rule
from irongrad.pipeline.guards.intervals import Interval, number

# Operators that return values, and their places in a dimension.
WITH_PLACES = frozenset(["sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin"])
POOLS_WITH_PLACES = {f"{kind}max_pool{n}d_with_indices": n for kind in ("", "fractional_") for n in (1, 2, 3)} | {
    f"{kind}max_pool{n}d": n for kind in ("adaptive_", "fractional_") for n in (1, 2, 3)
}


def places(node: Node, arguments: Mapping[str, Any]) -> Interval:
    """The positions in the dimension of an operator; in the flattened operand if it has no dimension."""
    shape, dim = arguments["self"].meta["val"].shape, arguments.get("dim")
    if dim is None:
        return below(math.prod(shape))
    return below(shape[dim]) if len(shape) else number(0)


@rule("randperm")
def _permutation(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["n"]) - 1)


@rule("multinomial")
def _drawn(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return below(arguments["self"].meta["val"].shape[-1])


@rule("argmax argmin argsort")
def _place(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return places(node, arguments)


@rule("searchsorted")
def _searched(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["sorted_sequence"].meta["val"].shape[-1]))


@rule("bucketize")
def _bucket(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["boundaries"].meta["val"].numel()))


@rule("count_nonzero")
def _count(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, expression_of(arguments["self"].meta["val"].numel()))


@rule("tril_indices triu_indices")
def _triangle(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return Interval(0, max(arguments["row"], arguments["col"], 1) - 1)
