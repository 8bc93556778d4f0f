"""Steps of an update that run between those that compute its gradients (`passes/module/update_early.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import Graph, Node

from irongrad.graph.step_graph import Value
from irongrad.memory_model.fusion import Kernels
from irongrad.memory_model.kernel_roles import bytes_of, source
from irongrad.memory_model.kernel_steps import Step
from irongrad.memory_model.values_between_functions import Handover


@dataclass(frozen=True)
class HandedOn:
    """Results that another graph reads on.

    Attributes:
        nodes: those that lie in one memory.
        written: the results that are computed before that memory is free.
        read: the arguments that are read before it is.
        kernels: as of a `Handover`.
    """

    nodes: frozenset[Node]
    written: frozenset[Node]
    read: frozenset[Node]
    kernels: int = 1


@dataclass(frozen=True)
class Reading:
    """How results are read on.

    Attributes:
        node: the first of them.
        bytes: of all of them.
        writes: the steps that write them.
        step: what reads them first.
        awaited: the steps that are done before their memory is free.
    """

    node: Node
    bytes: int
    writes: tuple[Step, ...]
    step: Step
    awaited: tuple[Step, ...]


def handed_on(
    graph: Graph, arguments: Sequence[Value], results: Sequence[Value], found: Collection[Handover]
) -> list[HandedOn]:
    """What a function computes for another one, of all that its step's do; other results have memory of their own."""
    computed = dict(zip(results, map(source, graph.output_node().args[0]), strict=True))
    given = dict(zip(arguments, graph.find_nodes(op="placeholder"), strict=True))
    return [
        HandedOn(
            frozenset(computed[value] for value in handover.gradients),
            frozenset(computed[value] for value in handover.awaited if value in computed),
            frozenset(given[value] for value in handover.awaited if value in given),
            handover.kernels,
        )
        for handover in found
        if handover.gradients <= computed.keys()
    ]


def with_readings(
    steps: Sequence[Step], kept: Collection[HandedOn], grouping: Kernels
) -> tuple[list[Step], list[Reading]]:
    """The steps of a graph and, between them, what first reads each of the results that are `kept`.

    That is the update itself, right behind all that it waits for, where it waits for no other gradients. Where it does,
    it is what adds those up, as for their norm, right behind the gradient.
    """
    running: dict[Node, list[Step]] = defaultdict(list)
    for step in steps:
        if step.kernel is not None:
            running[step.kernel].append(step)
    last_reader = {value: kernel for kernel in running for value in grouping.reads(kernel)}  # as they run in order
    position = {step: i for i, step in enumerate(steps)}
    found: list[Reading] = []
    behind: dict[int, list[Step]] = defaultdict(list)
    for group in kept:
        nodes = _computed(group.nodes, grouping)
        writes = tuple(_writing(nodes, running, grouping))
        if writes:
            read = (step for node in group.read if node in last_reader for step in running[last_reader[node]])
            awaited = (*_writing(_computed(group.written, grouping), running, grouping), *read)
            reads = _one_after_the_other(group.kernels, writes)
            behind[max(position[s] for s in (awaited if group.written == group.nodes else writes))] += reads
            found.append(Reading(nodes[0], sum(map(bytes_of, nodes)), writes, reads[0], awaited))
    return [each for i, step in enumerate(steps) for each in (step, *behind[i])], found


def _computed(nodes: Set[Node], grouping: Kernels) -> list[Node]:
    """Those of some nodes that kernels compute, in order."""
    return sorted((n for n in nodes if n in grouping.leader), key=grouping.position.__getitem__)


def _writing(nodes: Sequence[Node], running: Mapping[Node, list[Step]], grouping: Kernels) -> Iterator[Step]:
    """The steps that write results; the kernels of a concatenation's parts may be all that does so."""
    for node in nodes:
        head = grouping.leader[node]
        for kernel in [head] if head in running else grouping.operations.producers(head):
            yield from running.get(kernel, ())


def _one_after_the_other(count: int, first_needs: Collection[Step]) -> list[Step]:
    steps: list[Step] = []
    needs = frozenset(first_needs)
    for _ in range(count):
        steps.append(Step(None, frozenset(), (), needs))
        needs = frozenset(steps[-1:])
    return steps
