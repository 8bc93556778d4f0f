"""Attention and losses over large vocabularies in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.graph.nodes import sort_topologically, value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.graph.row_blocks.emit import emit
from irongrad.passes.graph.row_blocks.labels import PRODUCTS
from irongrad.passes.graph.row_blocks.region import Axes, Region, region_around, region_of_readers
from irongrad.passes.graph.row_blocks.rewrites import rewrite
from irongrad.passes.graph.row_blocks.tails import widths
from irongrad.passes.recompute import is_backward, is_forward

aten = torch.ops.aten

# The most parts of the columns of which a block may take fewer.
_STEPS = 4


@dataclass(frozen=True)
class RowBlocks:
    """Compute the softmax of a product, and its gradient, for one block of rows at a time.

    Before:
        s = bmm(q, k) + mask; p = softmax(s); o = bmm(p, v)       # s and p [B, T, T]
        --- backward ---
        dp = bmm(do, permute(v)); ds = p * (dp - sum(dp * p)); dq = bmm(ds, permute(k)); dk = bmm(permute(ds), q)
    After:
        s0 = bmm(q[:, :128], k[:, :128]) + mask[:128, :128]; o0 = bmm(exp(s0 - max(s0)), v[:, :128]) / sum
        s1 = bmm(tied q[:, 128:256], ...); ...; o = cat([o0, o1, ...])
        --- backward ---
        s0 and p0 again; ds0; dq0; dk0; s1 ...; dq = cat([dq0, dq1, ...]); dk = dk0 + dk1 + ...

    Neither the scores of attention nor the logits of a large vocabulary are then in memory as a whole: memory is linear
    in the length of a sequence. The backward computes the scores again, as FlashAttention-2 does (Dao, 2023). If it
    does not wait for other layers, as that of a cross-entropy at the end of a network, forward and backward are one:
    the logits of a block are computed once, as in Liger Kernel (Hsu et al., 2024). Columns that a constant mask hides
    from all rows of a block are not computed.

    A value belongs to a block if its operator treats rows alike: `labels.py` has the operators. Rows of a block are
    tied to the results of the block before it, so that IREE computes one block after the other.

    Left alone:

    * a softmax of fewer than `least` bytes, or of no product
    * a matrix that something else reads, such as attention weights that the model returns
    * operators that `labels.py` does not know, such as the random words of a dropout of attention weights
    * sizes whose divisors fit no number of blocks
    * graphs of any size, and targets other than a CPU, because the gain is not measured there

    Attributes:
        least: the fewest bytes of the matrix under a softmax.
        rows: the rows of a block, about.
        sums: the fewest bytes of a block's matrix, as a fraction of those of the sums over blocks, such as the gradient
            of an output layer. Each block reads and writes these sums.
    """

    name: ClassVar[str] = "row-blocks"

    least: int = 4 << 20
    rows: int = 128
    sums: float = 0.5

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if set(context.targets) != {"llvm-cpu"}:
            return PassResult(False)
        blocks = 0
        tried: set[tuple[Node, Axes]] = set()
        while (plan := self._next(graph, tried)) is not None:
            _apply(graph, plan)
            blocks += plan.blocks
        return PassResult(blocks > 0, {"blocks": blocks})

    def _next(self, graph: GraphModule, tried: set[tuple[Node, Axes]]) -> _Plan | None:
        """The next softmax that can be computed in blocks, rewritten to take few passes over its matrices."""
        for node, axes in list(_scores(graph)):
            if (node, axes) in tried or _bytes(node) < self.least:
                continue
            tried.add((node, axes))
            if (plan := _plan(graph, node, axes, self)) is not None:
                rewrite(plan.regions)
                eliminate_dead_code(graph)
                return _plan(graph, node, axes, self)
        return None


@dataclass(frozen=True)
class _Plan:
    """Regions to compute in blocks.

    Attributes:
        regions: of forward and backward together, or of both.
        blocks: the number of blocks.
        steps: the number of parts of the columns.
    """

    regions: tuple[Region, ...]
    blocks: int
    steps: int


def _scores(graph: GraphModule) -> Iterator[tuple[Node, Axes]]:
    """Yield the matrices whose largest elements along a dimension are subtracted, as in every softmax."""
    for node in graph.graph.nodes:
        if node.target is aten.amax.default and len(node.args) > 1:
            scores, dims = node.args[:2]
            assert isinstance(scores, Node)
            rank = value_of(scores).ndim
            if len(dims) == 1 and rank > 1:
                col = dims[0] % rank
                for row in [*range(col)[::-1], *range(col + 1, rank)]:
                    if value_of(scores).shape[row] > 1:
                        yield scores, Axes(row, col)


def _bytes(node: Node) -> int:
    size: int = value_of(node).nbytes
    return size


def _plan(graph: GraphModule, node: Node, axes: Axes, options: RowBlocks) -> _Plan | None:
    regions = _regions(node, axes, {n: i for i, n in enumerate(graph.graph.nodes)})
    if not regions or not any(n.target in PRODUCTS for n in regions[0].matrices):
        return None
    divisor, columns = (_common_divisor(regions, axis) for axis in (0, 1))
    sums = sum(_bytes(n) for region in regions for n in region.results if region.axes[n].row is None)
    wanted = value_of(node).shape[axes.row] // options.rows
    if sums * options.sums > 0:
        wanted = min(wanted, int(_bytes(node) / (sums * options.sums)))
    # Many more blocks would be too many kernels to compile. A block is left whole.
    fitting = [n for n in range(2, min(2 * wanted, divisor) + 1) if divisor % n == 0] if wanted > 1 else []
    steps = max(n for n in range(1, _STEPS + 1) if columns % n == 0)
    return _Plan(regions, min(fitting, key=lambda n: abs(n - wanted)), steps) if fitting else None


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


def _apply(graph: GraphModule, plan: _Plan) -> None:
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


PASS = RowBlocks
