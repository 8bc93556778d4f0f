"""Update steps that run between the steps that compute gradients (`passes/module/update_early.py`)."""

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
    """Results of a graph that another graph reads.

    Attributes:
        nodes: the results that share one buffer.
        written: the results that must be computed before the buffer is free.
        read: the arguments that must be read before the buffer is free.
        kernels: as in `Handover`.
    """

    nodes: frozenset[Node]
    written: frozenset[Node]
    read: frozenset[Node]
    kernels: int = 1


@dataclass(frozen=True)
class Reading:
    """How another graph reads results that share one buffer.

    Attributes:
        node: the first of the results.
        bytes: the size of all of them.
        writes: the steps that write them.
        step: the first step that reads them.
        awaited: the steps that must be done before the buffer is free.
    """

    node: Node
    bytes: int
    writes: tuple[Step, ...]
    step: Step
    awaited: tuple[Step, ...]


def handed_on(
    graph: Graph, arguments: Sequence[Value], results: Sequence[Value], found: Collection[Handover]
) -> list[HandedOn]:
    """Values that one function of the step hands to another. All other results have their own buffers.

    Args:
        graph: the graph of the function that computes the values.
        arguments: what its placeholders stand for.
        results: what its outputs stand for.
        found: the handovers of the step.
    """
    computed = dict(zip(results, map(source, graph.output_node().args[0]), strict=True))
    placeholders = dict(zip(arguments, graph.find_nodes(op="placeholder"), strict=True))
    return [
        HandedOn(
            frozenset(computed[value] for value in handover.gradients),
            frozenset(computed[value] for value in handover.awaited if value in computed),
            frozenset(placeholders[value] for value in handover.awaited if value in placeholders),
            handover.kernels,
        )
        for handover in found
        if handover.gradients <= computed.keys()
    ]


def with_readings(
    steps: Sequence[Step], kept: Collection[HandedOn], grouping: Kernels
) -> tuple[list[Step], list[Reading]]:
    """The steps of a graph and, between them, the steps that first read the `kept` results.

    If an update waits for no other gradients, these steps are the update itself, directly after everything it waits
    for. Otherwise they add up the gradients, as for their norm, directly after each gradient.

    Returns:
        All steps in order, and how each of the `kept` results is read.
    """
    running: dict[Node, list[Step]] = defaultdict(list)
    for step in steps:
        if step.kernel is not None:
            running[step.kernel].append(step)
    # Kernels come in run order, so the last reader of a value stays.
    last_reader = {value: kernel for kernel in running for value in grouping.reads(kernel)}
    position = {step: i for i, step in enumerate(steps)}
    found: list[Reading] = []
    behind: dict[int, list[Step]] = defaultdict(list)
    for group in kept:
        nodes = _in_run_order(group.nodes, grouping)
        writes = tuple(_writers(nodes, running, grouping))
        if writes:
            read = (step for node in group.read if node in last_reader for step in running[last_reader[node]])
            awaited = (*_writers(_in_run_order(group.written, grouping), running, grouping), *read)
            reads = _chain_of_steps(group.kernels, writes)
            behind[max(position[s] for s in (awaited if group.written == group.nodes else writes))] += reads
            found.append(Reading(nodes[0], sum(map(bytes_of, nodes)), writes, reads[0], awaited))
    return [each for i, step in enumerate(steps) for each in (step, *behind[i])], found


def _in_run_order(nodes: Set[Node], grouping: Kernels) -> list[Node]:
    """Those of `nodes` that kernels compute, in the order in which they run."""
    return sorted((n for n in nodes if n in grouping.leader), key=grouping.position.__getitem__)


def _writers(nodes: Sequence[Node], running: Mapping[Node, list[Step]], grouping: Kernels) -> Iterator[Step]:
    """The steps that write results; a concatenation may be written only by the kernels of its parts."""
    for node in nodes:
        head = grouping.leader[node]
        for kernel in [head] if head in running else grouping.operations.producers(head):
            yield from running.get(kernel, ())


def _chain_of_steps(count: int, first_needs: Collection[Step]) -> list[Step]:
    steps: list[Step] = []
    needs = frozenset(first_needs)
    for _ in range(count):
        steps.append(Step(None, frozenset(), (), needs))
        needs = frozenset(steps[-1:])
    return steps
