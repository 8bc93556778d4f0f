"""How many bytes of values are in memory at every moment of a graph."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node

from irongrad.passes.memory.control import demand_of
from irongrad.passes.memory.fusion import Kernels, kernels
from irongrad.passes.memory.nodes import bytes_of, is_control, source
from irongrad.passes.memory.placement import Span, place
from irongrad.passes.memory.steps import Buffer, Step, steps_of
from irongrad.passes.memory.submissions import submissions_of
from irongrad.passes.memory.waves import waves_of
from irongrad.passes.memory.written import is_in_place


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
        lifetimes: of every value that reaches memory, but for arguments and results.
        results: of the results that are computed, each from the submission on that writes it.
        computed: by moment, the kernels that run then.
        grouping: which kernel computes which node.
        submissions: the moments of each submission, and of each loop and branch.
    """

    lifetimes: tuple[Lifetime, ...]
    results: tuple[Lifetime, ...]
    computed: tuple[tuple[Node, ...], ...]
    grouping: Kernels
    submissions: tuple[range, ...]

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
        """The most that is allocated at once, without the results."""
        return self.most(())

    @property
    def total(self) -> int:
        """The most that is allocated at once, with the results."""
        return self.most({item.node for item in self.results})

    def most(self, kept: Collection[Node]) -> int:
        """The most that is allocated at once, with those results that are `kept`."""
        apart = [i for i in self.lifetimes if i.is_apart] + [i for i in self.results if i.node in kept]
        return max((self._placed(m) + sum(i.bytes for i in apart if i.is_in(m)) for m in self.submissions), default=0)

    def _placed(self, moments: range) -> int:
        """The size of the one allocation in which all that is not apart is placed."""
        inside = (i for i in self.lifetimes if not i.is_apart and i.start in moments)
        return place([Span(i.bytes, i.start, i.end) for i in inside]).total

    def at(self, moment: int) -> list[Lifetime]:
        """What is in memory at a moment."""
        return [item for item in self.lifetimes if item.start <= moment <= item.end]


def usage(graph: Graph, *, packed: bool = True) -> Usage:
    """The memory that `graph` uses, where operands of contractions are `packed` (`packing.packs`) or are not."""
    return _usage(graph, set(), packed, waves_of)


def _usage(
    graph: Graph, written: Set[Node], packed: bool, moments_of: Callable[[Sequence[Step]], dict[Step, int]]
) -> Usage:
    """As `usage`, of a graph of whose results `written` are written into memory before they are copied."""
    results = {source(n) for n in graph.output_node().all_input_nodes} - written
    grouping = kernels(graph, packed=packed)
    demands = {n: demand_of(n, partial(_inside, packed)) for n in graph.nodes if is_control(n)}
    steps = steps_of(graph, grouping, results, demands, packed=packed)
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
    lifetimes = tuple(_lifetimes(steps, moments, submissions))
    kept = [n for n in grouping.leader if n in results]
    return Usage(
        lifetimes,
        tuple(_kept(kept, computed, grouping, submissions)),
        tuple(map(tuple, computed)),
        grouping,
        tuple(submissions),
    )


def _inside(packed: bool, body: Graph, rows: Sequence[int]) -> int:
    """The bytes that a loop's body, or a branch, takes, which runs its kernels one after the other.

    A concatenation that is a row of a stack is made first, and then copied there.
    """
    results = body.output_node().args[0]
    written = {source(results[i]) for i in rows if is_in_place(source(results[i]))}
    return _usage(body, written, packed, lambda steps: {step: i for i, step in enumerate(steps)}).slab


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


def _kept(
    results: Sequence[Node], computed: Sequence[Sequence[Node]], grouping: Kernels, submissions: Sequence[range]
) -> Iterator[Lifetime]:
    """Of results, from the submission on that first writes to them."""
    written = {kernel: moment for moment in reversed(range(len(computed))) for kernel in computed[moment]}
    for node in results:
        head = grouping.leader[node]
        # The kernels of a concatenation's parts may be all that writes it.
        by = [head] if head in written else grouping.operations.producers(head)
        moments = _around(submissions, min((written[kernel] for kernel in by if kernel in written), default=0))
        yield Lifetime(node, bytes_of(node), moments.start, submissions[-1].stop - 1, is_apart=True)


def _around(submissions: Sequence[range], moment: int) -> range:
    """The moments of the submission that `moment` is one of."""
    return submissions[bisect(submissions, moment, key=lambda moments: moments.start) - 1]
