"""How many bytes of values are in memory at every moment of a graph."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node

from irongrad.memory_model.concurrent_kernels import waves_of
from irongrad.memory_model.early_updates import HandedOn, Reading, with_readings
from irongrad.memory_model.fusion import Kernels, kernels
from irongrad.memory_model.kernel_roles import is_control, source
from irongrad.memory_model.kernel_steps import Buffer, Step, steps_of
from irongrad.memory_model.loops_and_branches import demand_of
from irongrad.memory_model.placement import Span, place
from irongrad.memory_model.submissions import submissions_of
from irongrad.memory_model.written_views import is_in_place


@dataclass(frozen=True)
class Lifetime:
    """Memory that holds a value.

    Attributes:
        node: the value's.
        bytes: its size.
        start: the moment from which it is there: kernels that run at the same time are one moment.
        end: the last moment at which it is.
        is_apart: whether it is an allocation of its own, as other submissions read it.
    """

    node: Node
    bytes: int
    start: int
    end: int
    is_apart: bool = False

    def is_in(self, moments: range) -> bool:
        """Whether it is there at one of some moments that follow each other."""
        return self.start < moments.stop and moments.start <= self.end


@dataclass(frozen=True)
class Usage:
    """The memory of a graph.

    Attributes:
        lifetimes: of every value that reaches memory, but for arguments and results that no graph reads on.
        computed: by moment, the kernels that run then.
        grouping: which kernel computes which node.
        submissions: the moments of each submission, and of each loop and branch.
        left: bytes of what another graph reads on that are there when this one is through.
    """

    lifetimes: tuple[Lifetime, ...]
    computed: tuple[tuple[Node, ...], ...]
    grouping: Kernels
    submissions: tuple[range, ...]
    left: int

    def curve(self) -> list[int]:
        """Bytes in memory at every moment."""
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
        """The most bytes in memory at once."""
        return max(self.curve(), default=0)

    @property
    def total(self) -> int:
        """The most that is allocated at once."""
        apart = [item for item in self.lifetimes if item.is_apart]
        return max((self._placed(m) + sum(i.bytes for i in apart if i.is_in(m)) for m in self.submissions), default=0)

    def _placed(self, moments: range) -> int:
        """The size of the one allocation in which all that is not apart is placed."""
        inside = (i for i in self.lifetimes if not i.is_apart and i.start in moments)
        return place([Span(i.bytes, i.start, i.end) for i in inside]).total

    def at(self, moment: int) -> list[Lifetime]:
        """What is in memory at a moment."""
        return [item for item in self.lifetimes if item.start <= moment <= item.end]


def usage(graph: Graph, kept: Collection[HandedOn] = (), *, packed: bool = True) -> Usage:
    """The memory that `graph` uses, with what is `kept` for another graph.

    Operands of contractions are `packed` (`packing.packs`) or are not.
    """
    return _usage(graph, kept, set(), packed, waves_of)


def _usage(
    graph: Graph,
    kept: Collection[HandedOn],
    written: Set[Node],
    packed: bool,
    moments_of: Callable[[Sequence[Step]], dict[Step, int]],
) -> Usage:
    """As `usage`, of a graph of whose results `written` are written into memory before they are copied."""
    results = {source(n) for n in graph.output_node().all_input_nodes} - written
    grouping = kernels(graph, packed=packed)
    demands = {n: demand_of(n, partial(_inside, packed)) for n in graph.nodes if is_control(n)}
    steps, readings = with_readings(steps_of(graph, grouping, results, demands, packed=packed), kept, grouping)
    moments: dict[Step, int] = {}
    submissions: list[range] = []
    for part in submissions_of(steps):
        first = submissions[-1].stop if submissions else 0
        waves = moments_of(part)
        moments |= {step: first + wave for step, wave in waves.items()}
        submissions.append(range(first, first + 1 + max(waves.values())))
    computed: list[list[Node]] = [[] for _ in range(submissions[-1].stop if submissions else 0)]
    for step in steps:
        if step.kernel is not None:
            computed[moments[step]].append(step.kernel)
    read_on = tuple(_kept(reading, moments, submissions) for reading in readings)
    return Usage(
        (*_lifetimes(steps, moments, submissions), *read_on),
        tuple(map(tuple, computed)),
        grouping,
        tuple(submissions),
        sum(item.bytes for item in read_on if item.end == submissions[-1].stop - 1),
    )


def _inside(packed: bool, body: Graph, rows: Sequence[int]) -> int:
    """The bytes that a loop's body, or a branch, takes, which runs its kernels one after the other.

    A concatenation that is a row of a stack is made first, and then copied there.
    """
    results = body.output_node().args[0]
    written = {source(results[i]) for i in rows if is_in_place(source(results[i]))}
    return _usage(body, (), written, packed, lambda steps: {step: i for i, step in enumerate(steps)}).total


def _lifetimes(steps: Sequence[Step], moments: Mapping[Step, int], submissions: Sequence[range]) -> Iterator[Lifetime]:
    """Of all memory, in the order in which it is first written."""
    used: dict[Buffer, list[int]] = {}
    for step in sorted(steps, key=moments.__getitem__):
        for buffer in (*step.writes, *step.reads):
            used.setdefault(buffer, []).append(moments[step])
    for buffer, at in used.items():
        first, last = _around(submissions, at[0]), _around(submissions, at[-1])
        if first == last:
            yield Lifetime(buffer.node, buffer.bytes, at[0], at[-1])
        elif buffer.is_made_again:
            for each in dict.fromkeys(_around(submissions, moment) for moment in at[1:]):
                inside = [moment for moment in at if moment in each]
                yield Lifetime(buffer.node, buffer.bytes, max(each.start, inside[0] - 1), inside[-1])
        else:
            yield Lifetime(buffer.node, buffer.bytes, first.start, last.stop - 1, is_apart=True)


def _kept(reading: Reading, moments: Mapping[Step, int], submissions: Sequence[range]) -> Lifetime:
    """Of results that another graph reads: from when on they are written until that has all that it needs."""
    start = min(moments[step] for step in reading.writes)
    last, first = submissions[-1], _around(submissions, start)
    if first != last or any(step.kernel is not None and is_control(step.kernel) for step in reading.writes):
        return Lifetime(reading.node, reading.bytes, first.start, last.stop - 1, is_apart=True)
    end = max(moments[reading.step], *(moments[step] + 1 for step in reading.awaited))
    return Lifetime(reading.node, reading.bytes, start, min(end, last.stop - 1))


def _around(submissions: Sequence[range], moment: int) -> range:
    """The moments of the submission that `moment` is one of."""
    return submissions[bisect(submissions, moment, key=lambda moments: moments.start) - 1]
