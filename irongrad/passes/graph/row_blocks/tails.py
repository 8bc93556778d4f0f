"""How many columns a block of rows needs, if a mask of constants hides the last ones.

The values in the hidden columns are followed through the operators: a score of minus infinity becomes a weight of zero,
and a gradient of zero. Columns whose values change no sum and no maximum are not computed. As in eager's fused kernels,
a hidden infinity or NaN then does not reach the result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import value_of
from irongrad.memory_model.kernel_roles import is_constant, source
from irongrad.passes.graph.row_blocks.labels import PRODUCTS, RESHAPES, operands_of
from irongrad.passes.graph.row_blocks.region import Axes, Region

aten = torch.ops.aten

# A mask with more elements is not read.
_MOST_ELEMENTS = 1 << 26

# The value that changes no result of a reduction.
_NEUTRAL: dict[Any, float] = {
    aten.sum.dim_IntList: 0.0,
    aten.amax.default: -math.inf,
    aten.amin.default: math.inf,
    aten.all.dim: 1.0,
    aten.any.dim: 0.0,
    **dict.fromkeys(PRODUCTS, 0.0),
}

_MOVES: frozenset[Any] = RESHAPES | {
    aten.permute.default,
    aten.expand.default,
    aten.clone.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    torch.ops.prims.convert_element_type.default,
}


class _Tail(NamedTuple):
    """From the column `start` on, all values of a block's rows are `value`."""

    value: float
    start: int


def widths(region: Region, blocks: int, steps: int) -> list[int]:
    """Return for each block of rows how many of `steps` equal parts of the columns it needs."""
    masks = _masks(region)
    return [_Block(region, masks, block, blocks, steps).needed() for block in range(blocks)]


def _masks(region: Region) -> dict[Node, torch.Tensor]:
    """The values of the matrices that depend on no argument, as far as they are small enough."""
    values: dict[Node, torch.Tensor | None] = {}

    def value(node: Node) -> torch.Tensor | None:
        if node not in values:
            is_read = is_constant(source(node)) and value_of(node).numel() <= _MOST_ELEMENTS
            values[node] = computed(node) if is_read else None
        return values[node]

    def computed(node: Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            constant: torch.Tensor = getattr(node.graph.owning_module, str(node.target))
            return constant
        if any(value(o) is None for o in operands_of(node)):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), value)
        result: torch.Tensor = node.target(*args, **kwargs)
        return result

    return {n: v for n in region.matrices if n.target is not aten.full.default and (v := value(n)) is not None}


class _Block:
    def __init__(self, region: Region, masks: dict[Node, torch.Tensor], block: int, blocks: int, steps: int) -> None:
        self._region, self._masks, self._block, self._blocks, self._steps = region, masks, block, blocks, steps
        self._tails: dict[Node, _Tail | None] = {}

    def needed(self) -> int:
        """The parts of the columns that some result of the block depends on."""
        most = 1
        for node, axes in self._region.axes.items():
            self._tails[node] = self._tail(node) if axes.both else None
            operand_axes = self._region.operand_axes[node]
            if (axes.row is None or axes.col is None) and any(a.col is not None for a in operand_axes):
                most = max(most, self._start(node, axes))
        return most

    def _start(self, node: Node, axes: Axes) -> int:
        """The first part that the result of `node`, which is no matrix, does not depend on."""
        neutral = _NEUTRAL.get(node.target)
        if axes.col is not None:
            neutral = 0.0  # what is not computed of a sum over rows becomes zero
        tails = [self._tails.get(o) for o in operands_of(node)]
        starts = [t.start for t in tails if t is not None and t.value == neutral]
        return min(starts, default=self._steps)

    def _tail(self, node: Node) -> _Tail | None:
        if node in self._masks:
            return self._of_mask(self._masks[node], self._region.axes[node])
        if node.target is aten.full.default:
            return _Tail(float(node.args[1]), 0)
        operands = [self._known(o) for o in operands_of(node)]
        if node.target in _MOVES:
            return operands[0]
        if node.target in _NEUTRAL and node.target not in PRODUCTS:  # over other dimensions than the columns
            (tail,) = operands
            return tail if tail is not None and tail.value == _NEUTRAL[node.target] else None
        if node.target is aten.where.self:
            return _chosen(*operands)
        absorbing = [t for t in operands if t is not None and _absorbs(node.target, t.value, t is operands[0])]
        if absorbing:
            return min(absorbing, key=lambda t: t.start)
        if node.target in PRODUCTS or not operands or any(t is None for t in operands):
            return None
        return self._applied(node, [t for t in operands if t is not None])

    def _applied(self, node: Node, tails: list[_Tail]) -> _Tail | None:
        """The operator, applied to the values of the operands' tails."""
        remaining = iter(tails)

        def scalar(operand: Node) -> torch.Tensor:
            return torch.tensor(next(remaining).value, dtype=torch.float64).to(value_of(operand).dtype)

        if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), scalar)
        return _Tail(float(node.target(*args, **kwargs)), max(t.start for t in tails))

    def _known(self, node: Node) -> _Tail | None:
        """The tail of an operand; a number is one that begins at once."""
        if node in self._tails:
            return self._tails[node]
        is_number = node.target is aten.full.default and isinstance(node.args[1], (int, float))
        return _Tail(float(node.args[1]), 0) if is_number else None

    def _of_mask(self, value: torch.Tensor, axes: Axes) -> _Tail | None:
        row, col = axes
        assert row is not None
        assert col is not None
        size = value.shape[row] // self._blocks
        rows = value.narrow(row, self._block * size, size).movedim(col, -1).flatten(0, -2)
        last = rows[0, -1]
        others = (rows != last).any(0).nonzero()
        columns = int(others[-1]) + 1 if len(others) else 0
        per_step = value.shape[col] // self._steps
        return _Tail(float(last), -(-columns // per_step)) if not last.isnan() else None


def _chosen(condition: _Tail | None, true: _Tail | None, false: _Tail | None) -> _Tail | None:
    if condition is not None:
        taken = true if condition.value else false
        return None if taken is None else _Tail(taken.value, max(condition.start, taken.start))
    if true is not None and false is not None and true.value == false.value:
        return _Tail(true.value, max(true.start, false.start))
    return None


def _absorbs(target: object, value: float, is_first: bool) -> bool:
    """Whether the result is `value`, whatever the other finite operand is; the first one's dividend is not zero."""
    if target is aten.mul.Tensor:
        return value == 0
    if target is aten.div.Tensor:
        return value == 0 and is_first
    if target is aten.add.Tensor:
        return value == -math.inf
    if target is aten.sub.Tensor:
        return value == -math.inf and is_first
    return target is aten.bitwise_and.Tensor and value == 0
