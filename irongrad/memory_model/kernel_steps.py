"""What runs, step by step, and the memory that each step reads and writes.

A model of what IREE 3.13.0 makes of kernels (`fusion.py`) when it lowers them to its stream dialect:

* A contraction's operands are packed by steps of their own (`packing.py`).
* A concatenation is memory that is there before a step for each part copies that into it. Where the parts lie side by
  side, these run at once; else one after the other, as IREE takes them to overlap (`ResourceHazardAnalysis`).
* A padded value is memory, unless it is a result, that is cleared before a step copies the value into it. The input
  of a convolution with a padding is one, and taken again where another node pads the same value alike.
* A loop writes what it stacks into memory that is there before it (`control.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from irongrad.memory_model.fusion import Kernels
from irongrad.memory_model.kernel_roles import bytes_of, inputs_of, readers, source, sources
from irongrad.memory_model.loops_and_branches import Demand
from irongrad.memory_model.packed_operands import Packing, only_packed, packings
from irongrad.memory_model.placement import aligned
from irongrad.memory_model.written_views import dim_of, is_join, is_joined_anew, joined

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that holds a value, or a form of one.

    Attributes:
        node: the value's.
        bytes: its size, in whole cache lines.
        is_made_again: whether each submission that reads it makes it for itself, as it does packed arguments.
    """

    node: Node
    bytes: int
    is_made_again: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """What IREE runs at once: a kernel, a packing, an allocation, or a copy.

    Attributes:
        kernel: the kernel that it is of; None of a packing.
        reads: the memory that it reads.
        writes: the memory that it writes.
        needs: the steps that have to be done before.
    """

    kernel: Node | None
    reads: frozenset[Buffer]
    writes: tuple[Buffer, ...]
    needs: frozenset[Step]


def steps_of(
    graph: Graph, grouping: Kernels, results: Set[Node], demands: Mapping[Node, Demand], *, packed: bool
) -> list[Step]:
    """All that runs, in order. Arguments and `results` have no buffers.

    Args:
        graph: the graph.
        grouping: its kernels.
        results: the values that it returns.
        demands: what its loops and branches take.
        packed: whether operands of contractions are.
    """
    lowering = _Lowering(graph, grouping, results, demands, packings(grouping) if packed else [])
    for head in grouping.members:
        lowering.lower(head)
    return lowering.steps


class _Lowering:
    """The steps so far, and the memory that they write."""

    def __init__(
        self,
        graph: Graph,
        grouping: Kernels,
        results: Set[Node],
        demands: Mapping[Node, Demand],
        found: Sequence[Packing],
    ) -> None:
        self.steps: list[Step] = []
        self._grouping = grouping
        self._results = results
        self._demands = demands
        self._only_packed = only_packed(found, grouping)
        self._packings: dict[Node, list[Packing]] = defaultdict(list)
        for packing in found:
            for contraction in packing.contractions:
                self._packings[contraction].append(packing)
        self._pads = _pads(graph)
        self._parts_of_joins = _parts_of_joins(grouping)
        self._places: dict[Node, Node] = {}
        self._copied: dict[Node, dict[Node, Step]] = defaultdict(dict)
        self._lowered: set[Node] = set()
        self._values: dict[Node, Buffer] = {}
        self._packed: dict[Packing, Buffer] = {}
        self._padded: dict[Hashable, Buffer] = {}
        self._writers: dict[Buffer, list[Step]] = defaultdict(list)

    def lower(self, head: Node) -> None:
        """Add the steps of a kernel, if they are not there."""
        if head not in self._lowered:
            self._prepare(head)
            if head in self._parts_of_joins:
                self._place(head, self._parts_of_joins[head])
            self._lower(head)

    def _prepare(self, head: Node) -> None:
        self._lowered.add(head)
        for packing in self._packings[head]:
            self._pack(packing)

    def _place(self, head: Node, join: Node) -> None:
        """Have the kernel of `head` write to its place in a concatenation, which has all parts before it by then."""
        for part in inputs_of(join):
            kernel = self._grouping.leader.get(source(part))
            if kernel is head:
                self._places[source(part)] = join
                return
            self._lower_first(part)
            self._copy(part, join)

    def _lower_first(self, value: Node) -> None:
        """Add the steps of all that `value` is computed from."""
        stack = [self._grouping.leader[v] for v in sources(value) if v in self._grouping.leader]
        needed: set[Node] = set()
        while stack:
            kernel = stack.pop()
            if kernel not in self._lowered and kernel not in needed:
                needed.add(kernel)
                stack += [self._grouping.leader[v] for v in self._grouping.reads(kernel) if v in self._grouping.leader]
        for kernel in sorted(needed, key=self._grouping.position.__getitem__):
            self._prepare(kernel)
            self._lower(kernel)

    def _lower(self, head: Node) -> None:
        if is_join(head) or is_joined_anew(head):
            self._join(head)
        elif head in self._demands:
            self._run(head, self._demands[head])
        elif head.target is aten.constant_pad_nd.default:
            self._pad(head, _padding_of(head))
        else:
            if head.target is aten.convolution.default and any(head.args[4]):
                self._pad(head, _padding_of_input(head))
            self._compute(head)

    def _add(
        self, kernel: Node | None, reads: Iterable[Buffer], writes: Sequence[Buffer], after: Iterable[Step] = ()
    ) -> Step:
        reads = frozenset(reads)
        needs = frozenset(step for buffer in reads for step in self._writers[buffer])
        step = Step(kernel, reads, tuple(writes), needs | frozenset(after))
        self.steps.append(step)
        for buffer in writes:
            self._writers[buffer].append(step)
        return step

    def _pack(self, packing: Packing) -> None:
        value = source(packing.operand)
        if packing in self._packed or (value in self._only_packed and value not in self._results):
            return
        memory = self._memory_of([value])
        buffer = self._packed[packing] = Buffer(packing.operand, aligned(packing.bytes), value.op == "placeholder")
        self._add(None, memory, [buffer])

    def _join(self, head: Node) -> None:
        """A concatenation, part by part."""
        for part in inputs_of(head):
            self._copy(part, head)

    def _copy(self, part: Node, join: Node) -> None:
        """Copy a part to its place in a concatenation, where it is not."""
        if source(part) not in self._places and part not in self._copied[join]:
            before = self._copied[join].values() if not _lies_side_by_side(join) else ()
            step = self._add(join, self._memory_of(sources(part)), self._memory_for(join), before)
            self._copied[join][part] = step

    def _pad(self, head: Node, padding: Hashable) -> None:
        if padding not in self._padded:
            node = self._pads[padding]
            is_value = node.target is aten.constant_pad_nd.default
            size = 0 if is_value and node in self._results else _padded_bytes(node)
            buffer = self._padded[padding] = Buffer(node, aligned(size))
            if is_value:
                self._values[node] = buffer
            cleared = self._add(head, [], [buffer])
            self._add(head, self._memory_of(sources(head.all_input_nodes[0])), [buffer], [cleared])

    def _run(self, head: Node, demand: Demand) -> None:
        """A loop or a branch."""
        items = {n.args[1]: n for n in self._grouping.members[head] if n is not head}
        before = [Buffer(head, aligned(size)) for size in demand.begins]
        after = [Buffer(head, aligned(demand.inside))]
        for buffers, sizes in ((before, demand.stacks), (after, demand.made)):
            for place, size in sizes.items():
                item = items.get(place)
                if item in self._results:
                    continue
                buffer = Buffer(head if item is None else item, aligned(size))
                buffers.append(buffer)
                if item is not None:
                    self._values[item] = buffer
        for buffer in before:
            self._add(None, [], [buffer])
        self._add(head, [*self._memory_of(self._grouping.reads(head)), *before], after)

    def _compute(self, head: Node) -> None:
        """A kernel."""
        reads = set(self._memory_of(self._grouping.reads(head)))
        if head.target is aten.convolution.default and any(head.args[4]):
            reads -= set(self._memory_of(sources(head.args[0])))
            reads.add(self._padded[_padding_of_input(head)])
        reads -= set(self._memory_of(source(p.operand) for p in self._packings[head]))
        reads |= {self._packed[p] for p in self._packings[head] if p in self._packed}
        self._add(head, reads, [b for n in self._grouping.members[head] for b in self._memory_for(n)])

    def _memory_for(self, node: Node) -> tuple[Buffer, ...]:
        """Memory for the value of `node`, as it is or packed or as a part; none where nothing reads it from memory."""
        if node in self._results or not self._grouping.is_stored(node):
            return ()
        if node in self._values:
            return (self._values[node],)
        if node in self._places:
            return self._memory_for(self._places[node])
        buffer = Buffer(node, aligned(bytes_of(node)))
        if node in self._only_packed:
            packing = self._only_packed[node]
            buffer = self._packed[packing] = Buffer(node, aligned(packing.bytes))
        self._values[node] = buffer
        return (buffer,)

    def _memory_of(self, values: Iterable[Node]) -> list[Buffer]:
        return [self._values[v] for v in values if v in self._values]


def _parts_of_joins(grouping: Kernels) -> dict[Node, Node]:
    """By kernel that computes one piece of a concatenation, and nothing else, that concatenation."""
    found: dict[Node, Node] = {}
    for head in grouping.members:
        if (is_join(head) or is_joined_anew(head)) and _lies_side_by_side(head):
            for part in inputs_of(head):
                value = source(part)
                if value in grouping.leader and readers(value) == [head] and bytes_of(value) == bytes_of(part):
                    kernel = grouping.leader[value]
                    if [n for n in grouping.members[kernel] if grouping.is_stored(n)] == [value]:
                        found[kernel] = head
    return found


def _lies_side_by_side(join: Node) -> bool:
    """Whether each part of a concatenation is one piece of its memory."""
    whole = joined(join)
    return bool(math.prod(whole.meta["val"].shape[: dim_of(whole)]) == 1)


def _pads(graph: Graph) -> dict[Hashable, Node]:
    """By padding, the node that its memory is of: one that has the padded value, or else a convolution."""
    found: dict[Hashable, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if any(node.args[4]):
            found.setdefault(_padding_of_input(node), node)
    for node in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        found[_padding_of(node)] = node
    return found


def _padding_of(node: Node) -> Hashable:
    return source(node.args[0]), tuple(node.args[1])


def _padding_of_input(convolution: Node) -> Hashable:
    sides = tuple(p for size in reversed(convolution.args[4]) for p in (size, size))
    return source(convolution.args[0]), sides


def _padded_bytes(node: Node) -> int:
    """The size of a padded value, or of the padded input of a convolution."""
    if node.target is aten.constant_pad_nd.default:
        return bytes_of(node)
    value = node.args[0].meta["val"]
    sizes = [*value.shape[:2], *(s + 2 * p for s, p in zip(value.shape[2:], node.args[4], strict=True))]
    return int(math.prod(sizes) * value.element_size())
