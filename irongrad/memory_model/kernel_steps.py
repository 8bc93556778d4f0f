"""The steps that run, and the buffers that each step reads and writes.

A model of how IREE 3.13.0 lowers kernels (`fusion.py`) to its stream dialect:

* Steps of their own pack the operands of a contraction (`packed_operands.py`).
* A concatenation has a buffer, into which one step per part copies the part. If the parts are contiguous, these steps
  run at the same time. If not, they run one after the other, because IREE assumes that they overlap
  (`ResourceHazardAnalysis`).
* A padded value has a buffer, unless it is a result. One step clears the buffer, and the next copies the value into it.
  The input of a convolution with padding is a padded value. Nodes that pad the same value alike share the buffer.
* A loop writes the rows that it stacks into buffers that are allocated before it (`loops_and_branches.py`).
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
    """A buffer that holds a value, as it is or in another form.

    Attributes:
        node: the node that has the value.
        bytes: the size in bytes, rounded up to whole cache lines.
        is_made_again: whether each submission that reads the buffer computes it again, as it packs arguments again.
    """

    node: Node
    bytes: int
    is_made_again: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """A unit that IREE schedules: a kernel, a packing, an allocation, or a copy.

    Attributes:
        kernel: the kernel to which the step belongs; None for a step without one, such as a packing.
        reads: the buffers that the step reads.
        writes: the buffers that the step writes.
        needs: the steps that must be done before.
    """

    kernel: Node | None
    reads: frozenset[Buffer]
    writes: tuple[Buffer, ...]
    needs: frozenset[Step]


def steps_of(
    graph: Graph, grouping: Kernels, results: Set[Node], demands: Mapping[Node, Demand], *, packed: bool
) -> list[Step]:
    """The steps of a graph, in order. Arguments and `results` have no buffers.

    Args:
        graph: the graph.
        grouping: its kernels.
        results: the values that the graph returns.
        demands: the memory that its loops and branches take.
        packed: whether the operands of contractions are packed.
    """
    lowering = _Lowering(graph, grouping, results, demands, packings(grouping) if packed else [])
    for head in grouping.members:
        lowering.lower(head)
    return lowering.steps


class _Lowering:
    """The steps so far, and the buffers that they write."""

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
        """Add the steps of a kernel, unless they have been added."""
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
        """Let the kernel of `head` write to its place in a concatenation, after all parts before it are copied."""
        for part in inputs_of(join):
            kernel = self._grouping.leader.get(source(part))
            if kernel is head:
                self._places[source(part)] = join
                return
            self._lower_first(part)
            self._copy(part, join)

    def _lower_first(self, value: Node) -> None:
        """Add the steps of all kernels on which `value` depends."""
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
        """Add the steps of a concatenation, part by part."""
        for part in inputs_of(head):
            self._copy(part, head)

    def _copy(self, part: Node, join: Node) -> None:
        """Copy a part to its place in a concatenation, unless it is there."""
        if source(part) not in self._places and part not in self._copied[join]:
            before = self._copied[join].values() if not _has_contiguous_parts(join) else ()
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
        """Add the steps of a loop or a branch."""
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
        """Add the step of a kernel."""
        reads = set(self._memory_of(self._grouping.reads(head)))
        if head.target is aten.convolution.default and any(head.args[4]):
            reads -= set(self._memory_of(sources(head.args[0])))
            reads.add(self._padded[_padding_of_input(head)])
        reads -= set(self._memory_of(source(p.operand) for p in self._packings[head]))
        reads |= {self._packed[p] for p in self._packings[head] if p in self._packed}
        self._add(head, reads, [b for n in self._grouping.members[head] for b in self._memory_for(n)])

    def _memory_for(self, node: Node) -> tuple[Buffer, ...]:
        """The buffer for the value of `node`, plain, packed or as a part; empty if nothing reads it from memory."""
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
    """For each kernel that computes only one contiguous part of a concatenation, that concatenation."""
    found: dict[Node, Node] = {}
    for head in grouping.members:
        if (is_join(head) or is_joined_anew(head)) and _has_contiguous_parts(head):
            for part in inputs_of(head):
                value = source(part)
                if value in grouping.leader and readers(value) == [head] and bytes_of(value) == bytes_of(part):
                    kernel = grouping.leader[value]
                    if [n for n in grouping.members[kernel] if grouping.is_stored(n)] == [value]:
                        found[kernel] = head
    return found


def _has_contiguous_parts(join: Node) -> bool:
    """Whether each part of a concatenation is contiguous in its memory."""
    whole = joined(join)
    return bool(math.prod(whole.meta["val"].shape[: dim_of(whole)]) == 1)


def _pads(graph: Graph) -> dict[Hashable, Node]:
    """For each padding, the node that owns its buffer: the node with the padded value, or else a convolution."""
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
    """The size in bytes of a padded value, or of the padded input of a convolution."""
    if node.target is aten.constant_pad_nd.default:
        return bytes_of(node)
    value = node.args[0].meta["val"]
    sizes = [*value.shape[:2], *(s + 2 * p for s, p in zip(value.shape[2:], node.args[4], strict=True))]
    return int(math.prod(sizes) * value.element_size())
