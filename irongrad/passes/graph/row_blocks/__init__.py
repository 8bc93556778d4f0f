"""Attention and losses over large vocabularies in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.graph.row_blocks.forms import Forms
from irongrad.passes.graph.row_blocks.plan import Size, compute_in_blocks
from irongrad.passes.graph.row_blocks.region import Axes
from irongrad.targets import Ability

aten = torch.ops.aten


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

    Kernels of ours for attention, where a target has them, hold the scores of few rows at a time, however large a
    block is. Attention then comes in fewer, larger blocks, which read keys and values less often.

    With `--tune` the rows are chosen by measurement: the default, half as many, or twice as many. A smaller softmax
    than `least` may then come in blocks, too.

    Attributes:
        least: the fewest bytes of the matrix under a softmax.
        rows: the rows of a block, about.
        kernel_rows: the same where kernels of ours compute attention.
        sums: the fewest bytes of a block's matrix, as a fraction of those of the sums over blocks, such as the gradient
            of an output layer. Each block reads and writes these sums.
    """

    name: ClassVar[str] = "row-blocks"

    least: int = 4 << 20
    rows: int = 128
    kernel_rows: int = 256
    sums: float = 0.5

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if set(context.targets) != {"llvm-cpu"}:
            return PassResult(False)
        has_kernels = Ability.ATTENTION in context.abilities
        sizes = Size(self.rows, self.sums), Size(self.kernel_rows if has_kernels else self.rows, self.sums)
        forms = Forms(*sizes, self.least, context.timer)
        blocks = 0
        left = dict.fromkeys(_scores(graph))  # not those of blocks, which come later
        while (one := next((s for s in _scores(graph) if s in left), None)) is not None:
            del left[one]
            if (size := forms.chosen(*one)) is not None:
                blocks += compute_in_blocks(graph, *one, size)
        return PassResult(blocks > 0, {"blocks": blocks}, tuple(forms.choices.values()))


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


PASS = RowBlocks
