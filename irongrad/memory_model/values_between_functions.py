"""The values that one function of a step computes for the next, and when the next has read them.

An update runs as soon as its gradients are computed, and all other readers of the state that it replaces are done
(`passes/module/update_early.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_

from torch.fx import Node

from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.memory_model.kernel_roles import is_root


@dataclass(frozen=True)
class Handover:
    """Gradients computed in one function and read in another.

    Attributes:
        gradients: the gradients that share one buffer.
        awaited: the gradients that must be computed, and the state that must be read, before the buffer is free.
        kernels: the number of kernels that read the gradients one after the other before they need anything else, as
            for the sum of their squares.
    """

    gradients: frozenset[Value]
    awaited: frozenset[Value]
    kernels: int


@dataclass(frozen=True)
class _Use:
    """How a function uses an argument.

    Attributes:
        needed: all arguments of the results that depend on the argument, and the state that these results replace.
        kernels: as in `Handover`.
    """

    needed: frozenset[Value]
    kernels: int


def handovers(graph: StepGraph) -> tuple[Handover, ...]:
    """The gradients that functions hand to the update of state, or to the sums of gradients."""
    members = {Value("pack", pack.name): frozenset(pack.starts) for pack in graph.packs}
    found: dict[frozenset[Value], list[_Use]] = defaultdict(list)
    for function in graph.functions.values():
        for value, use in _uses(function).items():
            gradients = members.get(value, frozenset([value]))
            if all(each.kind == "gradient" for each in gradients):
                found[gradients].append(use)
    return tuple(
        Handover(
            gradients,
            frozenset(each for use in uses for value in use.needed for each in members.get(value, [value])),
            max(use.kernels for use in uses),
        )
        for gradients, uses in found.items()
    )


def _uses(function: Function) -> Mapping[Value, _Use]:
    """How a function uses each argument on which a result depends."""
    gradients = sum(1 << i for i, value in enumerate(function.arguments) if value.kind in ("gradient", "pack"))
    bits: dict[Node, int] = {}
    depths: dict[Node, int] = {}
    deepest: dict[int, int] = defaultdict(lambda: 1)
    for number, node in enumerate(function.graph.graph.nodes):
        if node.op == "placeholder":  # placeholders come first
            bits[node], depths[node] = 1 << number, 0
            continue
        bits[node] = reduce(or_, (bits[operand] for operand in node.all_input_nodes), 0)
        depths[node] = max((depths[n] for n in node.all_input_nodes), default=0) + is_root(node)
        alone = bits[node] & gradients
        deepest[alone] = max(deepest[alone], depths[node])
    results: dict[int, list[Value]] = defaultdict(list)  # by the arguments on which they depend
    for result, node in zip(function.results, function.graph.graph.output_node().args[0], strict=True):
        results[bits[node]].append(result)

    @cache  # many arguments are read by the same results
    def needed(reading: tuple[int, ...]) -> frozenset[Value]:
        read = reduce(or_, reading)
        arguments = (value for i, value in enumerate(function.arguments) if read >> i & 1)
        return frozenset((*arguments, *(result for each in reading for result in results[each])))

    uses: dict[Value, _Use] = {}
    for i, value in enumerate(function.arguments):
        if reading := tuple(each for each in results if each >> i & 1):
            uses[value] = _Use(needed(reading), deepest[1 << i])
    return uses
