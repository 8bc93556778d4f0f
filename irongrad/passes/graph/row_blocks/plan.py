"""Compute a softmax of a product, and its gradient, for one block of rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.graph.nodes import sort_topologically, value_of
from irongrad.passes.graph.row_blocks.emit import emit
from irongrad.passes.graph.row_blocks.labels import PRODUCTS
from irongrad.passes.graph.row_blocks.region import Axes, Region, region_around, region_of_readers
from irongrad.passes.graph.row_blocks.rewrites import rewrite
from irongrad.passes.graph.row_blocks.tails import widths
from irongrad.passes.recompute import is_backward, is_forward

# The most parts of the columns of which a block may take fewer.
_STEPS = 4


@dataclass(frozen=True)
class Size:
    """How large a block is, about.

    Attributes:
        rows: its rows.
        sums: the fewest bytes of its matrix, as a fraction of those of the sums over blocks.
    """

    rows: int
    sums: float


@dataclass(frozen=True)
class Plan:
    """Regions to compute in blocks.

    Attributes:
        regions: of forward and backward together, or of both.
        blocks: the number of blocks.
        steps: the number of parts of the columns.
    """

    regions: tuple[Region, ...]
    blocks: int
    steps: int


def compute_in_blocks(graph: GraphModule, node: Node, axes: Axes, size: Size) -> int:
    """Compute the softmax of a matrix, and its gradient, in blocks of rows.

    Args:
        graph: the graph, rewritten in place.
        node: the matrix.
        axes: its rows and columns.
        size: the size of a block.

    Returns:
        The number of blocks; 0 if the softmax stays whole.
    """
    plan = plan_of(node, axes, size)
    if plan is None:
        return 0
    rewrite(plan.regions)
    eliminate_dead_code(graph)
    if (plan := plan_of(node, axes, size)) is None:
        return 0
    _apply(graph, plan)
    return plan.blocks


def plan_of(node: Node, axes: Axes, size: Size) -> Plan | None:
    """How to compute the softmax of a matrix in blocks; None if it has to stay whole."""
    regions = _regions(node, axes, {n: i for i, n in enumerate(node.graph.nodes)})
    if not regions or not any(n.target in PRODUCTS for n in regions[0].matrices):
        return None
    divisor, columns = (_common_divisor(regions, axis) for axis in (0, 1))
    sums = sum(value_of(n).nbytes for region in regions for n in region.results if region.axes[n].row is None)
    wanted = value_of(node).shape[axes.row] // size.rows
    if sums * size.sums > 0:
        wanted = min(wanted, int(value_of(node).nbytes / (sums * size.sums)))
    # Many more blocks would be too many kernels to compile. A block is left whole.
    fitting = [n for n in range(2, min(2 * wanted, divisor) + 1) if divisor % n == 0] if wanted > 1 else []
    steps = max(n for n in range(1, _STEPS + 1) if columns % n == 0)
    return Plan(regions, min(fitting, key=lambda n: abs(n - wanted)), steps) if fitting else None


def _common_divisor(regions: tuple[Region, ...], axis: int) -> int:
    return math.gcd(*(region.divisor(axis) for region in regions))


def _regions(node: Node, axes: Axes, places: dict[Node, int]) -> tuple[Region, ...]:
    """The region of a softmax with its gradient, or the two regions of forward and backward."""
    whole = region_around(node, axes, _is_call, places)
    if whole is not None and not whole.outside:
        return (whole,)
    forward = region_around(node, axes, is_forward, places)
    if forward is None:
        return ()
    matrices = {n: forward.axes[n] for n in forward.matrices}
    backward = region_of_readers(matrices, is_backward, places)
    if backward is None or backward.outside or not forward.outside <= backward.axes.keys():
        return ()
    return forward, backward


def _is_call(node: Node) -> bool:
    return is_forward(node) or is_backward(node)


def _apply(graph: GraphModule, plan: Plan) -> None:
    places = {n: i for i, n in enumerate(graph.graph.nodes)}
    for number, region in enumerate(plan.regions):
        needed = dict.fromkeys(region.results)
        for later in plan.regions[number + 1 :]:  # it recomputes matrices, and reads what was reduced of them
            needed |= dict.fromkeys(o for _, o, _ in later.operands() if o in region.axes and o not in later.axes)
        late = _last_gradient(region, places) if number else None
        with graph.graph.inserting_before(list(region.axes)[-1].next):
            made = emit(region, list(needed), widths(region, plan.blocks, plan.steps), plan.steps, late)
        for node, new in made.items():
            node.replace_all_uses_with(new)
    sort_topologically(graph.graph)
    eliminate_dead_code(graph)


def _last_gradient(region: Region, places: dict[Node, int]) -> Node | None:
    """The value that is computed last, of those of the backward that a region reads."""
    read = [o for _, o, _ in region.operands() if o not in region.axes and is_backward(o)]
    floats = [o for o in read if value_of(o).is_floating_point() and value_of(o).numel()]
    return max(floats, key=places.__getitem__, default=None)
