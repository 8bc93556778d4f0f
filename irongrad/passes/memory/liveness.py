"""How many bytes of values are in memory at every moment of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from irongrad.passes.memory.fusion import Kernels, kernels
from irongrad.passes.memory.nodes import bytes_of, is_constant, source
from irongrad.passes.memory.placement import Span, place
from irongrad.passes.memory.steps import Buffer, Step, steps_of
from irongrad.passes.memory.waves import waves_of


@dataclass(frozen=True)
class Lifetime:
    """Memory that holds a value.

    Attributes:
        node: the value's.
        bytes: its size.
        start: the moment at which it is written: kernels that run at the same time are one moment.
        end: the moment at which it is last read.
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
        computed: by moment, the kernels that run then.
        grouping: which kernel computes which node.
    """

    lifetimes: tuple[Lifetime, ...]
    results: int
    computed: tuple[tuple[Node, ...], ...]
    grouping: Kernels

    def curve(self) -> list[int]:
        """Bytes in memory at every moment, without the results."""
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
        """The size of the one allocation in which all these are placed."""
        return place([Span(i.bytes, i.start, i.end) for i in self.lifetimes]).total

    @property
    def total(self) -> int:
        """What a run takes: one allocation for the results, and one for all else."""
        return self.slab + self.results

    def at(self, moment: int) -> list[Lifetime]:
        """What is in memory at a moment."""
        return [item for item in self.lifetimes if item.start <= moment <= item.end]


def usage(graph: Graph, *, packed: bool = True) -> Usage:
    """The memory that `graph` uses, where operands of contractions are `packed` (`packing.packs`) or are not."""
    results = {source(n) for n in graph.output_node().all_input_nodes}
    grouping = kernels(graph)
    steps = steps_of(graph, grouping, results, packed=packed)
    waves = waves_of(steps)
    kept = sum(bytes_of(n) for n in results if n.op == "call_function" and not is_constant(n))
    computed: list[list[Node]] = [[] for _ in range(max(waves.values(), default=-1) + 1)]
    for step in steps:
        if step.kernel is not None:
            computed[waves[step]].append(step.kernel)
    return Usage(tuple(_lifetimes(steps, waves)), kept, tuple(map(tuple, computed)), grouping)


def _lifetimes(steps: Sequence[Step], waves: Mapping[Step, int]) -> list[Lifetime]:
    """Of all memory, in the order in which it is first written."""
    start: dict[Buffer, int] = {}
    end: dict[Buffer, int] = {}
    for step in sorted(steps, key=waves.__getitem__):
        for buffer in step.writes:
            start.setdefault(buffer, waves[step])
        for buffer in (*step.reads, *step.writes):
            end[buffer] = max(end.get(buffer, 0), waves[step])
    return [Lifetime(b.node, b.bytes, start[b], end[b]) for b in start]
