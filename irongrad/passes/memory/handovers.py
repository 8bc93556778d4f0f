"""What a function of a step computes for the next one, and when that has read it.

An update is run as soon as what it needs is there (`pipeline/early_updates.py`): its own gradients, and the end of all
else that reads the state that it replaces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from irongrad.pipeline.graphs import Function, StepGraph, Value


@dataclass(frozen=True)
class Handover:
    """Gradients that are read by another function than computes them.

    Attributes:
        gradients: those that lie in one memory.
        awaited: the gradients, and state, that have to be computed, and read, before their memory is free.
    """

    gradients: frozenset[Value]
    awaited: frozenset[Value]


def handovers(graph: StepGraph) -> tuple[Handover, ...]:
    """What functions hand on to the update of state, or to the sums of gradients."""
    members = {Value("pack", pack.name): frozenset(pack.starts) for pack in graph.packs}
    awaited: dict[frozenset[Value], set[Value]] = defaultdict(set)
    for function in graph.functions.values():
        for value, needed in _needed_with(function).items():
            gradients = members.get(value, frozenset([value]))
            if all(each.kind == "gradient" for each in gradients):
                awaited[gradients].update(each for n in needed for each in members.get(n, [n]))
    return tuple(Handover(gradients, frozenset(needed)) for gradients, needed in awaited.items())


def _needed_with(function: Function) -> Mapping[Value, set[Value]]:
    """By argument, all arguments and old state that the results which need it need or replace."""
    needed: dict[Value, set[Value]] = defaultdict(set)
    for result, arguments in _arguments_of_results(function):
        for argument in arguments:
            needed[argument].update(arguments, [result])
    return needed


def _arguments_of_results(function: Function) -> Iterator[tuple[Value, list[Value]]]:
    """The results of a function, and the arguments that each is computed from."""
    bits: dict[Node, int] = {}
    number = 0
    for node in function.graph.graph.nodes:
        if node.op == "placeholder":
            bits[node] = 1 << number
            number += 1
        else:
            bits[node] = 0
            for operand in node.all_input_nodes:
                bits[node] |= bits[operand]
    for result, node in zip(function.results, function.graph.graph.output_node().args[0], strict=True):
        yield result, [value for i, value in enumerate(function.arguments) if bits[node] >> i & 1]
