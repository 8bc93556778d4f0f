"""How many bytes of values are live at each moment of a graph."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

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
    """The live range of a buffer that holds a value.

    Attributes:
        node: the node that has the value.
        bytes: the size of the buffer.
        start: the first moment at which the buffer is live. Kernels that run at the same time are one moment.
        end: the last moment at which the buffer is live.
        is_apart: whether the buffer is an allocation of its own, because other submissions read it.
    """

    node: Node
    bytes: int
    start: int
    end: int
    is_apart: bool = False

    def is_in(self, moments: range) -> bool:
        """Whether the buffer is live at any of these consecutive moments."""
        return self.start < moments.stop and moments.start <= self.end


@dataclass(frozen=True)
class Usage:
    """The memory that a graph uses.

    Attributes:
        lifetimes: the live ranges of all values in memory, except arguments, and results that no other graph reads.
        computed: the kernels that run at each moment.
        grouping: the kernels of the graph, with the nodes that they compute.
        submissions: the moments of each submission, and of each loop and branch.
        left: the bytes of values for another graph that are still live when this one has run.
    """

    lifetimes: tuple[Lifetime, ...]
    computed: tuple[tuple[Node, ...], ...]
    grouping: Kernels
    submissions: tuple[range, ...]
    left: int

    def curve(self) -> list[int]:
        """The live bytes at every moment."""
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
        """The peak of live bytes."""
        return max(self.curve(), default=0)

    @cached_property
    def total(self) -> int:
        """The peak of allocated bytes."""
        apart = [item for item in self.lifetimes if item.is_apart]
        return max(
            (self._shared_bytes(m) + sum(i.bytes for i in apart if i.is_in(m)) for m in self.submissions),
            default=0,
        )

    def _shared_bytes(self, moments: range) -> int:
        """The size of the shared allocation, which holds all buffers that are not allocations of their own."""
        inside = (i for i in self.lifetimes if not i.is_apart and i.start in moments)
        return place([Span(i.bytes, i.start, i.end) for i in inside]).total

    def at(self, moment: int) -> list[Lifetime]:
        """The buffers that are live at a moment."""
        return [item for item in self.lifetimes if item.start <= moment <= item.end]


def usage(graph: Graph, kept: Collection[HandedOn] = (), *, packed: bool = True) -> Usage:
    """The memory that `graph` uses.

    Args:
        graph: the graph.
        kept: the results that stay in memory for another graph.
        packed: whether operands of contractions are packed (`packed_operands.packs`).
    """
    return _usage(graph, kept, set(), packed, is_body=False)


def _usage(
    graph: Graph,
    kept: Collection[HandedOn],
    written: Set[Node],
    packed: bool,
    *,
    is_body: bool,
) -> Usage:
    """As `usage`; the results in `written` are built in buffers, and then copied.

    The kernels of the body of a loop or a branch run one after the other.
    """
    moments_of = _in_turn if is_body else waves_of
    results = {source(n) for n in graph.output_node().all_input_nodes} - written
    grouping = kernels(graph, packed=packed, is_body=is_body)
    demands = {n: demand_of(n, partial(_body_bytes, packed)) for n in graph.nodes if is_control(n)}
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
    read_on = tuple(_handed_on_lifetime(reading, moments, submissions) for reading in readings)
    return Usage(
        (*_lifetimes(steps, moments, submissions), *read_on),
        tuple(map(tuple, computed)),
        grouping,
        tuple(submissions),
        sum(item.bytes for item in read_on if item.end == submissions[-1].stop - 1),
    )


def _body_bytes(packed: bool, body: Graph, rows: Sequence[int]) -> int:
    """The bytes that the body of a loop or a branch takes.

    A concatenation that is a row of a stack is built in a buffer first, and then copied to the stack.
    """
    results = body.output_node().args[0]
    written = {source(results[i]) for i in rows if is_in_place(source(results[i]))}
    return _usage(body, (), written, packed, is_body=True).total


def _in_turn(steps: Sequence[Step]) -> dict[Step, int]:
    """The moment of each step, where no two run at the same time."""
    return {step: i for i, step in enumerate(steps)}


def _lifetimes(steps: Sequence[Step], moments: Mapping[Step, int], submissions: Sequence[range]) -> Iterator[Lifetime]:
    """The live ranges of all buffers, in the order in which they are first written."""
    used: dict[Buffer, list[int]] = {}
    for step in sorted(steps, key=moments.__getitem__):
        for buffer in (*step.writes, *step.reads):
            used.setdefault(buffer, []).append(moments[step])
    for buffer, at in used.items():
        first, last = _submission_at(submissions, at[0]), _submission_at(submissions, at[-1])
        if first == last:
            yield Lifetime(buffer.node, buffer.bytes, at[0], at[-1])
        elif buffer.is_made_again:
            for each in dict.fromkeys(_submission_at(submissions, moment) for moment in at[1:]):
                inside = [moment for moment in at if moment in each]
                yield Lifetime(buffer.node, buffer.bytes, max(each.start, inside[0] - 1), inside[-1])
        else:
            yield Lifetime(buffer.node, buffer.bytes, first.start, last.stop - 1, is_apart=True)


def _handed_on_lifetime(reading: Reading, moments: Mapping[Step, int], submissions: Sequence[range]) -> Lifetime:
    """The live range of results for another graph: from the first write until that graph needs them no more."""
    start = min(moments[step] for step in reading.writes)
    last, first = submissions[-1], _submission_at(submissions, start)
    if first != last or any(step.kernel is not None and is_control(step.kernel) for step in reading.writes):
        return Lifetime(reading.node, reading.bytes, first.start, last.stop - 1, is_apart=True)
    end = max(moments[reading.step], *(moments[step] + 1 for step in reading.awaited))
    return Lifetime(reading.node, reading.bytes, start, min(end, last.stop - 1))


def _submission_at(submissions: Sequence[range], moment: int) -> range:
    """The moments of the submission that contains `moment`."""
    return submissions[bisect(submissions, moment, key=lambda moments: moments.start) - 1]
