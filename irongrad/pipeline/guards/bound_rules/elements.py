"""Bounds of operators that move, choose or overwrite elements of their operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.movements import OF_ONE_TENSOR, Movement, names
from irongrad.pipeline.guards import intervals
from irongrad.pipeline.guards.bound_rules.registry import Known, below, inexact, rule
from irongrad.pipeline.guards.index_uses import operator_name
from irongrad.pipeline.guards.intervals import UNKNOWN, Interval, join, number


@rule(" ".join(names(OF_ONE_TENSOR & ~(Movement.CUT | Movement.SPLIT) | Movement.CAST | Movement.OVERWRITE)))
def _same(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    source = node.args[1] if operator_name(node) in names(Movement.OVERWRITE) else node.args[0]
    found = bounds.of(source)
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if after is torch.bool:
        return found if before is torch.bool else Interval(0, 1)
    if before.is_floating_point and not after.is_floating_point:
        return intervals.truncated(found.whole())
    return found


@rule(" ".join(names(Movement.CUT)) + " narrow diagonal unfold as_strided masked_select max_pool2d max_pool1d")
def _cut(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return inexact(bounds.of(node.args[0]))


@rule("gather index index_select take take_along_dim _unsafe_index")
def _taken(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return inexact(bounds.of(arguments["self"]))


@rule("embedding")
def _looked_up(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return inexact(bounds.of(arguments["weight"]))


@rule("repeat_interleave")
def _repeated(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    if "self" in arguments:
        return inexact(bounds.of(arguments["self"]))
    return below(arguments["repeats"].meta["val"].numel())


@rule("cat stack concat concatenate hstack vstack")
def _joined(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return join(bounds.of(t) for t in arguments["tensors"])


@rule("constant_pad_nd pad")
def _padded(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("mode", "constant") != "constant":
        return inexact(bounds.of(arguments["self"]))
    return join([bounds.of(arguments["self"]), bounds.of(arguments["value"] or 0)])


@rule("diag_embed slice_backward select_backward tril triu")
def _among_zeros(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    return join([inexact(bounds.of(node.args[0])), number(0)])


@rule("diagonal_scatter select_scatter slice_scatter scatter index_put index_copy masked_scatter index_fill put")
def _written(bounds: Known, node: Node, arguments: dict[str, Any]) -> Interval:
    if arguments.get("accumulate") or arguments.get("reduce"):
        return UNKNOWN
    written = next(arguments[n] for n in ("src", "values", "source", "value") if n in arguments)
    if _replaces_all(bounds, node, arguments):
        return inexact(bounds.of(written))
    return join([inexact(bounds.of(arguments["self"])), inexact(bounds.of(written))])


def _replaces_all(bounds: Known, node: Node, arguments: Mapping[str, Any]) -> bool:
    """Whether every element is written.

    The index is a permutation, as in `inverse[order] = torch.arange(n)`, or the only place, as in `place[0] = n`.
    """
    if operator_name(node) == "select_scatter":
        size = arguments["self"].meta["val"].shape[arguments["dim"]]
        return isinstance(size, int) and size == 1
    found = arguments.get("indices", [arguments.get("index")])
    whole = arguments["self"].meta["val"].shape
    return len(found) == 1 and len(whole) == 1 and bounds.is_permutation(found[0], whole[0])
