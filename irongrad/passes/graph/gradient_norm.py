"""Sum the squares of packed gradients in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, replace, sort_topologically, value_of
from irongrad.passes.base import Context, PassResult
from irongrad.passes.inline import inline

aten = torch.ops.aten

_REARRANGED = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class GradientNorm:
    """Sum the squares of adjacent parts of a packed tensor at once.

    Before:
        a = t[:n]; b = t[n:]; x = sum(a * a); y = sum(b * b); z = sum(g * g); norm = sqrt(sum(stack([x, y, z])))
    After:
        c = t[:]; x = sum(c * c); z = sum(g * g); norm = sqrt(sum(stack([z, x])))

    Clipping by the global norm (Pascanu et al., arXiv:1211.5063) sums the squares of every gradient: one or two kernels
    for each. The pass `multi-tensor`, which runs before, packs the small gradients next to each other.

    The pass only joins sums that are added up, or whose square roots are squared and added up. Left alone: sums with
    any other use, and tensors followed by a gap, because a gap may hold anything.

    The sums are stacked in the order in which a backward computes the gradients: the last parameter's first. All parts
    write into the stack, so IREE 3.13.0 lists everything that one part depends on before the kernel of the next
    (EmplaceAllocations.cpp).
    """

    name: ClassVar[str] = "gradient-norm"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        joined, changed = 0, False
        position = {n: i for i, n in enumerate(graph.graph.nodes)}
        for stack in [n for n in graph.graph.nodes if n.target is aten.stack.default and _is_norm_of(n)]:
            runs = _runs([piece for total in stack.args[0] if (piece := _piece_of(total)) is not None])
            for run in runs:
                _join(run)
                joined += len(run)
            left_out = {piece.total for _, *others in runs for piece in others}
            ordered = sorted(stack.args[0], key=lambda total: _backward_order(total, position))
            totals = [total for total in ordered if total not in left_out]
            if totals != list(stack.args[0]):
                _replace_norm(totals, stack)
                changed = True
        if changed:
            sort_topologically(graph.graph)
        return PassResult(changed, {"joined": joined})


@dataclass(frozen=True)
class _Piece:
    """A part of a packed tensor.

    Attributes:
        pack: the packed tensor, of rank 1.
        start: the index of its first element in the pack.
        stop: the index after its last element.
        total: the node of the sum of its squares.
    """

    pack: Node
    start: int
    stop: int
    total: Node


def _is_norm_of(stack: Node) -> bool:
    """Whether the only use of stacked sums of squares is the sum of the squares of their square roots."""
    roots = list(stack.users)
    # an operand stands twice, or the operands are not scalars
    if len(stack.all_input_nodes) != len(stack.args[0]) or value_of(stack).ndim != 1:
        return False
    if len(roots) != 1 or roots[0].target is not aten.sqrt.default:
        return False
    squares = list(roots[0].users)
    if len(squares) != 1 or squares[0].target is not aten.mul.Tensor or squares[0].args != (roots[0], roots[0]):
        return False
    return all(u.target is aten.sum.dim_IntList for u in squares[0].users)


def _piece_of(total: Node) -> _Piece | None:
    """The piece whose sum of squares is `total`; None if it is anything else."""
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
    return _Piece(pack, start, start + value_of(piece).numel(), total)


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Sequences of two or more pieces in which each piece ends where the next begins."""
    found: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.pack.name, p.start)):
        if found and (last := found[-1][-1]).pack is piece.pack and last.stop == piece.start:
            found[-1].append(piece)
        else:
            found.append([piece])
    return [run for run in found if len(run) > 1]


def _join(run: list[_Piece]) -> None:
    """Make the first sum of a run the sum over the whole run."""
    first = run[0].total
    with first.graph.inserting_before(first):
        whole = call(first.graph, aten.slice.Tensor, run[0].pack, 0, run[0].start, run[-1].stop, like=first)
    replace(first, inline(_sum_of_squares, [whole], first))


def _backward_order(total: Node, position: Mapping[Node, int]) -> tuple[bool, int]:
    """A sort key: when a backward has computed the gradient that `total` sums.

    Packs come last, because a pack is complete only when all its parts are.
    """
    node, is_packed = total, False
    while node.all_input_nodes:
        is_packed = is_packed or node.target is aten.slice.Tensor
        node = node.all_input_nodes[0]
    return is_packed, -position.get(node, 0)


def _replace_norm(totals: Sequence[Node], stack: Node) -> None:
    """Replace the norm of the stacked sums by the norm of `totals`, in their order."""
    (roots,) = stack.users
    (squares,) = roots.users
    with stack.graph.inserting_before(squares):
        both = call(stack.graph, aten.stack.default, list(totals), like=stack)
        root = call(stack.graph, aten.sqrt.default, both, like=roots)
        replace(squares, call(stack.graph, aten.mul.Tensor, root, root, like=squares))


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


PASS = GradientNorm
