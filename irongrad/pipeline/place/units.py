"""The modules of a model in the order of its forward, with what each costs, holds and passes on: places to cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import nn
from torch.fx import Node

from irongrad.graph.sources import module_of
from irongrad.graph.step_graph import StepGraph
from irongrad.memory_model.kernel_roles import bytes_of, is_view, source
from irongrad.memory_model.node_costs import cost
from irongrad.pipeline.place.chains import chained
from irongrad.pipeline.place.owners import Ownership
from irongrad.pipeline.place.parts import Part
from irongrad.targets import Target

# A module that costs more than this share of a part is replaced by its children.
_COARSEST = 0.6


@dataclass(frozen=True)
class Units:
    """Modules in the order of the forward.

    Attributes:
        paths: the path of each.
        costs: what forward, backward and update of each cost, in seconds by the cost model.
        state: the bytes of the parameters, buffers, optimizer state and accumulated gradients of each.
        passed: the bytes of each value that one module computes for others, with the number of the one, and of those.
    """

    paths: tuple[str, ...]
    costs: tuple[float, ...]
    state: tuple[int, ...]
    passed: tuple[tuple[int, int, frozenset[int]], ...]


@dataclass(frozen=True)
class Division:
    """Consecutive modules for each part.

    Attributes:
        bounds: the number of the first module of each part, and behind the last the number of all modules.
        costs: the cost of each part.
        state: the bytes of state of each part.
        passed: the bytes that parts pass to others in a step.
    """

    bounds: tuple[int, ...]
    costs: tuple[float, ...]
    state: tuple[int, ...]
    passed: int


def units_of(graph: StepGraph, model: nn.Module, target: Target, parts: int) -> Units:
    """The modules at whose borders a step may be cut into `parts` parts."""
    whole = chained(("joint", "update"), graph)
    nodes = [n for n in whole.graph.graph.nodes if n.op == "call_function"]
    paths = _chosen(nodes, model, parts)
    ownership = Ownership([Part(path, (path,), target, "") for path in paths], graph)
    owners = ownership.of(whole)
    costs = Counter[int]()
    for node in nodes:
        if node in owners:
            costs[owners[node]] += cost(node)  # type: ignore[assignment]
    state = Counter[int]()
    for tensor in graph.state:
        holder = ownership.holder(tensor)
        if holder is not None:
            size = tensor.initial.numel() * tensor.initial.element_size()
            state[holder] += size * (2 if tensor.name in graph.gradients else 1)
    numbers = range(len(paths))
    return Units(
        tuple(paths),
        tuple(float(costs[n]) for n in numbers),
        tuple(state[n] for n in numbers),
        tuple(_passed(nodes, owners)),
    )


def divisions(units: Units, parts: int) -> Iterator[Division]:
    """All ways to give each of `parts` parts consecutive modules."""
    count = len(units.paths)
    for inner in combinations(range(1, count), parts - 1):
        bounds = (0, *inner, count)
        part = [n for n, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
        passed = sum(
            size * len({part[reader] for reader in readers} - {part[maker]}) for size, maker, readers in units.passed
        )
        yield Division(
            bounds,
            tuple(sum(units.costs[start:end]) for start, end in pairwise(bounds)),
            tuple(sum(units.state[start:end]) for start, end in pairwise(bounds)),
            passed,
        )


def _chosen(nodes: Sequence[Node], model: nn.Module, parts: int) -> list[str]:
    """The paths of modules, coarse ones replaced by their children, in the order in which they first compute."""
    costs, first = Counter[str](), dict[str, int]()
    for position, node in enumerate(nodes):
        path = module_of(node)
        while path:
            costs[path] += cost(node)  # type: ignore[assignment]
            first.setdefault(path, position)
            path = path.rpartition(".")[0]
    modules = dict(model.named_modules())
    limit = _COARSEST * sum(costs[name] for name, _ in model.named_children()) / parts
    waiting, chosen = [name for name, _ in model.named_children()], list[str]()
    while waiting:
        path = waiting.pop()
        children = [f"{path}.{name}" for name, _ in modules[path].named_children()]
        used = [child for child in children if child in first]
        if used and (costs[path] > limit or isinstance(modules[path], nn.Sequential | nn.ModuleList | nn.ModuleDict)):
            waiting += used
        elif path in first:
            chosen.append(path)
    return sorted(chosen, key=first.__getitem__)


def _passed(nodes: Sequence[Node], owners: Mapping[Node, int]) -> Iterator[tuple[int, int, frozenset[int]]]:
    readers: dict[Node, set[int]] = {}
    for node in nodes:
        if node in owners and not is_view(node):
            for operand in map(source, node.all_input_nodes):
                if operand in owners and operand.op == "call_function" and owners[operand] != owners[node]:
                    readers.setdefault(operand, set()).add(owners[node])
    for node, found in readers.items():
        if isinstance(node.meta["val"], torch.Tensor):
            yield bytes_of(node), owners[node], frozenset(found)
