"""How many bytes of values are in memory at every point of a graph.

Also those that contractions lay out anew: with data tiling, IREE 3.13.0 packs both operands of a contraction into tiles
first, each into memory of its size that lives until the product is computed; and it runs at the same time what does not
depend on each other. What nothing reads but one packing is written packed by the kernel that computes it
(compiler/src/iree/compiler/DispatchCreation/FuseEncodingOpsIntoDispatchRegions.cpp).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch.fx import Graph, Node

from irongrad.passes.memory.fusion import (
    Kernels,
    bytes_of,
    is_constant,
    is_pointwise,
    kernels,
    readers,
    source,
    sources,
)
from irongrad.passes.memory.order import with_late_sums_early
from irongrad.passes.memory.written import CONTRACTIONS, JOINS

aten = torch.ops.aten

# Of the products of Philox's ten rounds each half is read by itself; other elementwise code has a few such values.
_FORKS_OF_A_GENERATOR = 10
_BETWEEN = 3

# Rows and columns of a tile of float32 with AVX-512 (enumerateMatmulTileX86_64 in CPUEncodingExternalModels.cpp); half
# as many with AVX2, where the prediction is high for products of which both dimensions are less.
_TILE = 16


@dataclass(frozen=True)
class Lifetime:
    """Memory that holds a value.

    Attributes:
        node: the value's.
        bytes: its size.
        start: the position in the graph where it is written.
        end: the position where it is last read.
    """

    node: Node
    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Usage:
    """The memory of a graph.

    Attributes:
        lifetimes: of every value that reaches memory, but for arguments and results.
        results: bytes of the results.
    """

    lifetimes: tuple[Lifetime, ...]
    results: int

    def curve(self) -> list[int]:
        """Bytes in memory at every position, without the results."""
        length = 1 + max((item.end for item in self.lifetimes), default=0)
        change = [0] * (length + 1)
        for item in self.lifetimes:
            change[item.start] += item.bytes
            change[item.end + 1] -= item.bytes
        total, found = 0, []
        for step in change[:length]:
            total += step
            found.append(total)
        return found

    @property
    def peak(self) -> int:
        """The most bytes in memory at once, without the results."""
        return max(self.curve(), default=0)

    @property
    def slab(self) -> int:
        """The size of the one allocation in which IREE places all these, each at the lowest offset where it fits best.

        The greedy strip packing of compiler/src/iree/compiler/Dialect/Stream/Transforms/LayoutSlices.cpp.
        """
        placed: list[tuple[int, Lifetime]] = []
        for item in sorted(self.lifetimes, key=lambda i: i.start):
            best, gap, offset = None, math.inf, 0
            for start, other in placed:
                if other.end < item.start or other.start > item.end:
                    continue
                if offset + item.bytes <= start and start - offset < gap:
                    best, gap = offset, start - offset
                offset = max(offset, start + other.bytes)
            bisect.insort(placed, (offset if best is None else best, item), key=lambda p: p[0])
        return max((start + item.bytes for start, item in placed), default=0)

    @property
    def total(self) -> int:
        """What a run takes: one allocation for the results, and one for all else."""
        return self.slab + self.results

    def at(self, position: int) -> list[Lifetime]:
        """What is in memory at a position."""
        return [item for item in self.lifetimes if item.start <= position <= item.end]


def usage(graph: Graph) -> Usage:
    """The memory that `graph` uses."""
    graph = with_late_sums_early(graph)
    grouping = kernels(graph)
    output = graph.output_node()
    results = {source(n) for n in output.all_input_nodes}
    padded = _padded_inputs(graph)
    packings = _packings(graph, grouping)
    only_packed = _only_packed(packings, grouping) - results
    found: list[Lifetime] = [_packed(p, grouping, only_packed) for p in packings]
    for node in grouping.leader:
        if node in results or node in only_packed or not grouping.is_stored(node):
            continue
        ends = [grouping.runs_at(r) for r in readers(node)]
        start = grouping.runs_at(node)
        if node.target is aten.constant_pad_nd.default:
            start = min([start, *(grouping.runs_at(n) for n in padded.pop(_padding_of(node), ()))])
        found.append(Lifetime(node, _aligned(bytes_of(node)), start, max([start, *ends])))
    found += _between_parts(grouping)
    found.extend(_padding_itself(node, grouping) for nodes in padded.values() for node in nodes)
    kept = sum(bytes_of(n) for n in results if n.op == "call_function" and not is_constant(n))
    return Usage(tuple(found), kept)


@dataclass(frozen=True)
class _Packing:
    """What a contraction reads in tiles.

    Attributes:
        operand: what is packed.
        contraction: what reads it.
        start: the earliest position at which it is written, while the contraction before runs.
    """

    operand: Node
    contraction: Node
    start: int


def _packings(graph: Graph, grouping: Kernels) -> list[_Packing]:
    """The packed operands of contractions.

    What elementwise code in the kernel of a contraction reads is packed as its result is.
    """
    found: list[_Packing] = []
    before = 0
    beside = _read_beside(grouping)
    for node in graph.nodes:
        if node.target in CONTRACTIONS:
            found += [_Packing(operand, node, before) for operand in [*node.all_input_nodes[-2:], *beside[node]]]
            before = grouping.runs_at(node)
    return found


def _only_packed(packings: Iterable[_Packing], grouping: Kernels) -> set[Node]:
    """The values that are never in memory but packed: all of each is read by one packing, and by nothing else."""
    times = Counter(source(p.operand) for p in packings)
    return {
        value
        for p in packings
        if times[value := source(p.operand)] == 1
        and value in grouping.leader
        and value.target not in JOINS
        and bytes_of(value) == bytes_of(p.operand)
        and {grouping.leader.get(r) for r in readers(value)} - {grouping.leader[value]} == {p.contraction}
    }


def _packed(packing: _Packing, grouping: Kernels, only_packed: Set[Node]) -> Lifetime:
    value, time = source(packing.operand), grouping.runs_at(packing.contraction)
    there = _there(value, grouping)
    start = there if value in only_packed else min(time, max(packing.start, there))
    return Lifetime(packing.operand, _aligned(_packed_bytes(packing)), start, time)


def _packed_bytes(packing: _Packing) -> int:
    """The size of an operand in tiles: the dimensions of the product are filled up, but for the shorter one."""
    rows, columns = packing.contraction.meta["val"].shape[-2:]
    filled = [_filled(rows, rows < columns), _filled(columns, columns <= rows)]
    left, right = packing.contraction.args[-2:]
    has_rows, has_columns = packing.operand is not right, packing.operand is not left
    grown = Fraction(filled[0], max(rows, 1)) ** has_rows * Fraction(filled[1], max(columns, 1)) ** has_columns
    return int(bytes_of(packing.operand) * grown)


def _filled(size: int, is_shorter: bool) -> int:
    """A dimension in tiles, which are a power of two high where all of it is less than a tile (chooseMatmulTile)."""
    if is_shorter and size < _TILE:
        return 1 << (size - 1).bit_length()
    return -(-size // _TILE) * _TILE


def _between_parts(grouping: Kernels) -> list[Lifetime]:
    """What long elementwise code hands from one of its kernels to the next, before the last one runs.

    IREE 3.13.0 does not compute all rounds of a random number generator in one kernel: it takes a producer with several
    readers into a kernel one at a time (FuseMultiUseElementwiseProducer.cpp). In what it makes of Philox's ten rounds,
    three values are between two kernels.
    """
    forks: dict[Node, list[Node]] = defaultdict(list)
    for node, head in grouping.leader.items():
        if is_pointwise(node) and sum(grouping.leader.get(user) is head for user in node.users) > 1:
            forks[head].append(node)
    found: list[Lifetime] = []
    for head, nodes in forks.items():
        if len(nodes) >= _FORKS_OF_A_GENERATOR:
            widest, before = max(nodes, key=bytes_of), max(0, grouping.runs_at(head) - 1)
            found += [Lifetime(widest, _aligned(bytes_of(widest)), before, before)] * _BETWEEN
    return found


def _there(value: Node, grouping: Kernels) -> int:
    """When a value can be read: a concatenation is written part by part, which are all gone by then."""
    return grouping.runs_at(value) + (value.target in JOINS)


def _read_beside(grouping: Kernels) -> dict[Node, dict[Node, None]]:
    """By contraction, what the elementwise code in its kernel reads from memory."""
    found: dict[Node, dict[Node, None]] = defaultdict(dict)
    for node, head in grouping.leader.items():
        if head.target in CONTRACTIONS and node is not head:
            for operand in (s for n in node.all_input_nodes for s in sources(n)):
                if grouping.leader.get(operand) is not head and not is_constant(operand):
                    found[head][operand] = None
    return found


def _padded_inputs(graph: Graph) -> dict[Hashable, list[Node]]:
    """The convolutions that pad their input, by input and padding.

    IREE 3.13.0 writes the padded input to memory, and takes it again where a `constant_pad_nd` makes the same.
    """
    found: dict[Hashable, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        padding = node.args[4]
        if any(padding):
            sides = [p for size in reversed(padding) for p in (size, size)]
            found[source(node.args[0]), tuple(sides)].append(node)
    return found


def _padding_of(node: Node) -> Hashable:
    return source(node.args[0]), tuple(node.args[1])


def _padding_itself(node: Node, grouping: Kernels) -> Lifetime:
    """The padded input of a convolution that nobody else wants."""
    value = node.args[0].meta["val"]
    sizes = [*value.shape[:2], *(s + 2 * p for s, p in zip(value.shape[2:], node.args[4], strict=True))]
    time = grouping.runs_at(node)
    return Lifetime(node, _aligned(math.prod(sizes) * value.element_size()), time, time)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
