"""Which elementwise nodes IREE fuses into one operation, before it divides a graph into kernels.

A model of two passes of IREE 3.13.0 (compiler/src/iree/compiler/DispatchCreation):

* `ElementwiseOpFusion.cpp` fuses an elementwise node into the operation that alone reads it. A reduction fuses only
  with a node that has the shape of its input, with no dimensions merged in between.
* `FuseMultiUseElementwiseProducer.cpp` fuses an elementwise producer with several readers into the first of them, if
  that is elementwise and has the same shape. An operation fuses with one such producer at a time, in two rounds.
  `irongrad.passes.module.fuse_elementwise` runs more rounds before these, within its own limits.

A softmax that `RaiseSpecialOps.cpp` recognises is one operation, which computes nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node

from irongrad.memory_model.fusion_limits import LARGEST, ROUNDS
from irongrad.memory_model.kernel_roles import (
    inputs_of,
    is_cloned,
    is_constant,
    is_item,
    is_pointwise,
    is_reduction,
    is_root,
    is_view,
    readers,
    shape_of,
    sources,
)
from irongrad.memory_model.written_views import is_cut_up, strides_of

aten = torch.ops.aten

# The most values that a kernel may read and write together (kIreeMaxOperandCount in FusionUtils.h).
MOST_OPERANDS = 16
_ROUNDS = 2


class Operations:
    """The nodes of a graph, grouped into operations.

    Attributes:
        leader: for each computed node, the node that stands for its operation: the last one.
        members: for each leader, the nodes of its operation.
        position: the index of every node in the graph.
        read: for each computed node, the values that it reads, in order, without constants.
        readers: for each computed node, the nodes that read its value, including the output.
    """

    def __init__(self, graph: Graph) -> None:
        self.leader: dict[Node, Node] = {}
        self.members: dict[Node, list[Node]] = {}
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.read: dict[Node, tuple[Node, ...]] = {}
        self.readers: dict[Node, tuple[Node, ...]] = {}
        raised = {n: last for last in graph.nodes for n in softmax_of(last)}
        for node in graph.nodes:
            if node in raised:
                self._add(node, raised[node])
            elif is_item(node):
                self._add(node, node.all_input_nodes[0])
            elif not is_cloned(node) and (is_root(node) or (is_pointwise(node) and not is_constant(node))):
                self._add(node, node)
        for rounds, is_such in ((ROUNDS, self._is_for_all), (_ROUNDS, self.is_elementwise)):
            while self._take_in_producers():
                pass
            for _ in range(rounds):
                if not self._merge_producers(is_such):
                    break

    def is_elementwise(self, head: Node) -> bool:
        """Whether the operation of `head` is elementwise code."""
        return is_pointwise(head) and len(softmax_of(head)) == 0

    def reading(self, nodes: Iterable[Node]) -> set[Node]:
        """The operations that read values of `nodes`; also the output if it does."""
        return {self.leader.get(r, r) for n in nodes for r in self.readers[n]}

    def producers(self, head: Node) -> dict[Node, None]:
        """The other operations whose values the operation of `head` reads, in order."""
        values = self.operands(self.members[head])
        return {self.leader[v]: None for v in values if v in self.leader}

    def merge(self, head: Node, into: Node) -> None:
        """Fuse the operation of `head` into the operation `into`."""
        for node in self.members.pop(head):
            self._assign(node, into)

    def operands(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """The values that `nodes` read and do not compute themselves, in order, without constants."""
        inside = dict.fromkeys(nodes)
        return {value: None for n in inside for value in self.read[n] if value not in inside}

    def _add(self, node: Node, head: Node) -> None:
        self._assign(node, head)
        self.read[node] = tuple(s for n in inputs_of(node) for s in sources(n) if not is_constant(s))
        self.readers[node] = tuple(readers(node))

    def _assign(self, node: Node, head: Node) -> None:
        self.leader[node] = head
        self.members.setdefault(head, []).append(node)

    def _take_in_producers(self) -> bool:
        """Run one round that fuses elementwise operations into their only reader; return whether any were fused."""
        before = len(self.members)
        for head in sorted(self.members, key=self.position.__getitem__):
            if head in self.members and (is_reduction(head) or self.is_elementwise(head)):
                for producer in self.producers(head):
                    if self._is_read_by(producer, head):
                        self.merge(producer, head)
        return len(self.members) < before

    def _is_read_by(self, producer: Node, head: Node) -> bool:
        """Whether `head` is the only reader of the elementwise operation of `producer`, and may fuse with it."""
        if not self.is_elementwise(producer) or self.reading(self.members[producer]) - {producer} != {head}:
            return False
        if is_reduction(head) and not _is_reduced_whole(producer, head):
            return False
        return self._has_room(producer, head)

    def _merge_producers(self, is_such: Callable[[Node], bool]) -> bool:
        """Run one round that fuses producers with several readers, if `is_such` holds; return whether any fused."""
        taken: dict[Node, Node] = {}
        for head in sorted(self.members, key=self.position.__getitem__):
            if self.is_elementwise(head):
                free = (p for p in self.producers(head) if p not in taken and p not in taken.values() and is_such(p))
                producer = next((p for p in free if self._is_first_read_by(p, head)), None)
                if producer is not None:
                    taken[producer] = head
        for producer, head in taken.items():
            self.merge(producer, head)
        return bool(taken)

    def _is_for_all(self, head: Node) -> bool:
        """Whether an operation is elementwise, no reduction reads it, and the values that others read are small."""
        inside = self.members[head]
        if not self.is_elementwise(head) or any(map(is_reduction, self.reading(inside))):
            return False
        return all(shape_of(n).numel() <= LARGEST for n in inside if self.reading([n]) - {head})

    def _is_first_read_by(self, producer: Node, head: Node) -> bool:
        """Whether `head` is the first reader of the elementwise operation of `producer`, and may fuse with it."""
        if shape_of(producer).numel() != shape_of(head).numel():
            return False
        first = min(self.reading(self.members[producer]) - {producer}, key=self.position.__getitem__)
        return first is head and self._has_room(producer, head)

    def _has_room(self, producer: Node, head: Node) -> bool:
        operands = {**self.operands(self.members[producer]), **self.operands(self.members[head])}
        return len(operands) < MOST_OPERANDS and not any(map(is_cut_up, self.members[producer]))


def softmax_of(last: Node) -> tuple[Node, ...]:
    """The nodes of the softmax that ends with `last`; empty if no softmax does."""
    if last.target is not aten.div.Tensor or not all(isinstance(a, Node) for a in last.args):
        return ()
    exponential, total = last.args
    if exponential.target is not aten.exp.default or total.target is not aten.sum.dim_IntList:
        return ()
    shifted = exponential.args[0]
    if total.args[0] is not exponential or shifted.target is not aten.sub.Tensor:
        return ()
    value, greatest = shifted.args
    if not isinstance(greatest, Node) or greatest.target is not aten.amax.default or greatest.args[0] is not value:
        return ()
    return last, total, exponential, shifted, greatest


def _is_reduced_whole(node: Node, reduction: Node) -> bool:
    """Whether the input of `reduction` has the size of `node`, with no dimensions merged in between."""
    reduced = reduction.args[0]
    if shape_of(reduced).numel() != shape_of(node).numel():
        return False
    while is_view(reduced):
        before = reduced.all_input_nodes[0]
        if reduced.target is operator.getitem or _merges(shape_of(before), shape_of(reduced)):
            return False
        reduced = before
    return True


def _merges(before: torch.Size, after: torch.Size) -> bool:
    """Whether a reshape merges several dimensions into one."""
    if before.numel() != after.numel() or sorted(before) == sorted(after):
        return False
    return not strides_of(before) <= strides_of(after)
