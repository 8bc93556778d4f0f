"""The squares of packed gradients, summed in one pass."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.passes.base import Context, PassResult, value_of
from irongrad.passes.inline import inline
from irongrad.passes.rewrite import call, replace, sort_topologically

aten = torch.ops.aten

_REARRANGED = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class GradientNorm:
    """Sum the squares of neighbours in a packed tensor at once.

    Before:
        a = t[:n]; b = t[n:]; x = sum(a * a); y = sum(b * b); norm = sqrt(x + y)
    After:
        c = t[:]; x = sum(c * c); y = 0; norm = sqrt(x + y)

    Clipping by the global norm (Pascanu et al., arXiv:1211.5063) sums the squares of every gradient: a kernel or two
    for each, where `multi-tensor`, which runs before, has the small ones side by side. The sums are only ever added up,
    or their square roots squared and added up: sums that anything else reads are left alone, as are tensors with a gap
    behind them, in which anything may stand.
    """

    name: ClassVar[str] = "gradient-norm"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        joined = 0
        for stack in [n for n in graph.graph.nodes if n.target is aten.stack.default and _is_norm_of(n)]:
            by_pack: dict[Node, dict[int, tuple[int, Node]]] = defaultdict(dict)
            for total in dict.fromkeys(stack.all_input_nodes):
                piece = _squared(total)
                if piece is not None:
                    pack, start, stop = piece
                    by_pack[pack][start] = stop, total
            for pack, pieces in by_pack.items():
                for run in _runs(pieces):
                    _join(pack, run, pieces)
                    joined += len(run)
        if joined:
            sort_topologically(graph.graph)
        return PassResult(joined > 0, {"joined": joined})


def _is_norm_of(stack: Node) -> bool:
    """Whether all that is done with stacked sums of squares is to add up the squares of their square roots."""
    roots = list(stack.users)
    if len(roots) != 1 or roots[0].target is not aten.sqrt.default:
        return False
    squares = list(roots[0].users)
    if len(squares) != 1 or squares[0].target is not aten.mul.Tensor or squares[0].args != (roots[0], roots[0]):
        return False
    return all(u.target is aten.sum.dim_IntList or u.target in _REARRANGED for u in squares[0].users)


def _squared(total: Node) -> tuple[Node, int, int] | None:
    """The tensor of rank 1, and from where to where, of which `total` is the sum of the squares."""
    if value_of(total).ndim or len(total.users) != 1:
        return None
    node = total
    while node.target is aten.sum.dim_IntList or node.target in _REARRANGED:
        (node,) = node.all_input_nodes
        if len(node.users) != 1:
            return None
    if node.target is not aten.mul.Tensor or node.args[0] is not node.args[1]:
        return None
    (piece,) = node.all_input_nodes
    while piece.target in _REARRANGED:
        (piece,) = piece.all_input_nodes
    if piece.target is not aten.slice.Tensor or value_of(piece).ndim != 1 or len(piece.args) != 4:
        return None
    pack, _, start, _ = piece.args
    assert isinstance(pack, Node)
    assert isinstance(start, int)
    return pack, start, start + value_of(piece).numel()


def _runs(pieces: dict[int, tuple[int, Node]]) -> list[list[int]]:
    """The starts of pieces of which each ends where the next begins; two or more together."""
    runs: list[list[int]] = []
    end = -1
    for start in sorted(pieces):
        if start == end:
            runs[-1].append(start)
        else:
            runs.append([start])
        end = pieces[start][0]
    return [r for r in runs if len(r) > 1]


def _join(pack: Node, run: list[int], pieces: dict[int, tuple[int, Node]]) -> None:
    """Have the first sum stand for all, and zeros for the others."""
    first, *others = (pieces[start][1] for start in run)
    graph = first.graph
    with graph.inserting_before(first):
        whole = call(graph, aten.slice.Tensor, pack, 0, run[0], pieces[run[-1]][0], like=first)
        zero = call(graph, aten.full.default, [], 0.0, like=first, dtype=value_of(first).dtype)
    total = inline(_sum_of_squares, [whole], first)
    replace(first, total)
    for other in others:
        replace(other, zero)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


PASS = GradientNorm
