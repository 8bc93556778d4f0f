"""Write a region as blocks of rows, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import value_of
from irongrad.passes.graph.row_blocks.labels import PRODUCTS, SIZE_ARGUMENT
from irongrad.passes.graph.row_blocks.region import Axes, Region
from irongrad.passes.recompute import added, is_backward, never, tie

aten = torch.ops.aten
prims = torch.ops.prims


def emit(
    region: Region, needed: Sequence[Node], widths: Sequence[int], steps: int, late: Node | None
) -> dict[Node, Node]:
    """Add the blocks at the graph's insertion point.

    The rows that a block multiplies are tied to the results of the block before it. Otherwise IREE would compute the
    matrices of all blocks at once, and hold them all in memory.

    Args:
        region: the region.
        needed: its results that are read.
        widths: for each block of rows, how many parts of the columns it takes.
        steps: the number of parts.
        late: a value that is computed before the first block; None if it need not wait.

    Returns:
        The new value of each of `needed`.
    """
    parts: dict[Node, list[Node]] = {node: [] for node in needed}
    sums: dict[Node, dict[int, Node]] = {node: {} for node in needed if region.axes[node].row is None}
    before = [late] if late is not None else []
    for block, width in enumerate(widths):
        one = _Block(region, block, len(widths), width, steps, before)
        before = []
        for node in needed:
            new = one.computed(node)
            if node in sums:
                new = _wide(new, node)
                if (old := sums[node].get(width)) is not None:
                    new = _like(node, aten.add.Tensor, old, new)
                sums[node][width] = new
            else:
                parts[node].append(new)
            if value_of(new).is_floating_point() and value_of(new).numel():
                before.append(new)
    made = {n: _joined(n, parts[n], region.axes[n]) for n in needed if n not in sums}
    return made | {n: _total(n, found, region.axes[n], steps) for n, found in sums.items()}


def _wide(new: Node, node: Node) -> Node:
    """A part of a sum, in float32 if `node` is in half precision, so that the sum is rounded once."""
    if value_of(new).dtype not in (torch.float16, torch.bfloat16):
        return new
    return _like(node, prims.convert_element_type.default, new, torch.float32)


def _like(node: Node, operator: Any, *args: Any) -> Node:
    """Add a call of `operator` in the phase of `node`, and with its source."""
    return added(node.graph, operator, *args, like=node, backward=is_backward(node))


class _Block:
    def __init__(self, region: Region, block: int, blocks: int, width: int, steps: int, before: Sequence[Node]) -> None:
        self._region, self._block, self._blocks, self._width, self._steps = region, block, blocks, width, steps
        self._new: dict[Node, Node] = {}
        self._cuts: dict[tuple[Node, Axes], Node] = {}
        self._tied: dict[Node, Node] = {}
        self._before = before
        self._condition: Node | None = None
        self._backward = any(map(is_backward, region.axes))
        for node in region.axes:
            self._new[node] = self._compute(node)

    def computed(self, node: Node) -> Node:
        """The block's part of `node`."""
        return self._new[node]

    def _compute(self, node: Node) -> Node:
        axes = iter(self._region.operand_axes[node])
        makes_matrix = node.target in PRODUCTS and self._region.axes[node].both
        args, kwargs = map_arg((node.args, node.kwargs), lambda o: self._operand(o, next(axes), makes_matrix))
        if (place := SIZE_ARGUMENT.get(node.target)) is not None:
            args = (*args[:place], self._sizes(node), *args[place + 1 :])
        return self._add(node, node.target, *args, **kwargs)

    def _add(self, like: Node, operator: Any, *args: Any, **kwargs: Any) -> Node:
        return added(like.graph, operator, *args, like=like, backward=self._backward, **kwargs)

    def _sizes(self, node: Node) -> list[int]:
        sizes = list(value_of(node).shape)
        row, col = self._region.axes[node]
        if row is not None:
            sizes[row] //= self._blocks
        if col is not None:
            sizes[col] = sizes[col] // self._steps * self._width
        return sizes

    def _operand(self, operand: Node, axes: Axes, makes_matrix: bool) -> Node:
        new = self._new.get(operand) or self._cut(operand, axes)
        if makes_matrix and axes.row is not None and self._before:
            return self._after(new)
        return new

    def _cut(self, operand: Node, axes: Axes) -> Node:
        """The block's part of a value from outside."""
        if (operand, axes) not in self._cuts:
            new, shape = operand, value_of(operand).shape
            if axes.row is not None:
                size = shape[axes.row] // self._blocks
                start = self._block * size
                new = self._add(operand, aten.slice.Tensor, new, axes.row, start, start + size)
            if axes.col is not None and self._width < self._steps:
                end = shape[axes.col] // self._steps * self._width
                new = self._add(operand, aten.slice.Tensor, new, axes.col, 0, end)
            self._cuts[operand, axes] = new
        return self._cuts[operand, axes]

    def _after(self, operand: Node) -> Node:
        """The value of `operand`, which is not known before the block before it is computed."""
        if operand not in self._tied:
            if self._condition is None:
                self._condition = never(operand.graph, self._before, backward=self._backward)
            self._tied[operand] = tie(operand.graph, operand, self._condition, backward=self._backward)
        return self._tied[operand]


def _joined(node: Node, parts: Sequence[Node], axes: Axes) -> Node:
    return _like(node, aten.cat.default, list(parts), axes.row)


def _total(node: Node, found: dict[int, Node], axes: Axes, steps: int) -> Node:
    """The sum of the blocks' sums; those of fewer columns are zero in the others."""
    total: Node | None = None
    for width, part in found.items():
        whole = part
        if axes.col is not None and width < steps:
            rank, size = value_of(node).ndim, value_of(node).shape[axes.col]
            padding = [0] * (2 * rank)
            padding[2 * (rank - 1 - axes.col) + 1] = size - size // steps * width
            whole = _like(node, aten.constant_pad_nd.default, part, padding, 0.0)
        total = whole if total is None else _like(node, aten.add.Tensor, total, whole)
    assert total is not None
    if (dtype := value_of(node).dtype) is not value_of(total).dtype:
        total = _like(node, prims.convert_element_type.default, total, dtype)
    return total
