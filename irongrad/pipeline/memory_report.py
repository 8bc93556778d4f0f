"""StepGraph -> MemorySpec: the peak memory of a step, predicted before it is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath

import torch
from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.dtypes import numpy_name
from irongrad.graph.step_graph import Function, StepGraph
from irongrad.memory_model.early_updates import handed_on
from irongrad.memory_model.fusion import Kernels
from irongrad.memory_model.kernel_roles import is_constant, is_view, sources
from irongrad.memory_model.liveness import Usage, usage
from irongrad.memory_model.packed_operands import packs
from irongrad.memory_model.values_between_functions import Handover, handovers
from irongrad.passes.recompute import is_backward, is_forward, original_names
from irongrad.pipeline.assemble.interface import Interface, chain_of
from irongrad.pipeline.memory_budget import Budget
from irongrad.runtime.manifest import ForwardValue, MemorySpec


def memory_of(
    graph: StepGraph, interface: Interface, usages: Mapping[str, Usage], budget: Budget | None = None
) -> MemorySpec:
    """Plan the memory of every entry point of `graph` that computes something at static sizes.

    Args:
        graph: the step graph.
        interface: its entry points.
        usages: the result of `usages_of`.
        budget: the budget of entry points that run the backward; None for no limit.
    """
    known = _known(graph)
    predicted = {e: _peak_of_chain(chain, usages) for e, chain in _chains(graph, interface).items()}
    joint = known.get("joint")
    values = tuple(_forward_values(joint, usages["joint"].grouping)) if joint is not None else ()
    return MemorySpec(budget.asked if budget else "", predicted, values, limits_of(graph, interface, budget))


def usages_of(graph: StepGraph, backends: Collection[str]) -> dict[str, Usage]:
    """The memory of each function of static sizes, on these backends; if they take different memory, on a CPU."""
    found = handovers(graph)
    return {name: _usage(f, found, packed=packs(backends)) for name, f in _known(graph).items()}


def usages_of_all(graphs: Mapping[str, StepGraph], backends: Collection[str]) -> dict[str, dict[str, Usage]]:
    """The memory of the functions of several steps, by the step's name."""
    return {name: usages_of(graph, backends) for name, graph in graphs.items()}


def _usage(function: Function, found: Collection[Handover], *, packed: bool) -> Usage:
    kept = handed_on(function.graph.graph, function.arguments, function.results, found)
    return usage(function.graph.graph, kept, packed=packed)


def memory_of_all(
    graphs: Mapping[str, StepGraph],
    interfaces: Mapping[str, Interface],
    usages: Mapping[str, Mapping[str, Usage]],
    budget: Budget | None = None,
) -> MemorySpec:
    """Plan the memory of several steps; arguments as in `memory_of`, by the step's name."""
    plans = [memory_of(graph, interfaces[name], usages[name], budget) for name, graph in graphs.items()]
    predicted = {entry: size for plan in plans for entry, size in plan.predicted.items()}
    limits = {entry: size for plan in plans for entry, size in plan.limits.items()}
    return MemorySpec(plans[0].budget, predicted, tuple(v for plan in plans for v in plan.values), limits)


def limits_of_all(
    graphs: Mapping[str, StepGraph], interfaces: Mapping[str, Interface], budget: Budget | None
) -> dict[str, int]:
    """The limits in bytes of entry points that run the backward, of all steps."""
    return {e: size for name, graph in graphs.items() for e, size in limits_of(graph, interfaces[name], budget).items()}


def limits_of(graph: StepGraph, interface: Interface, budget: Budget | None) -> dict[str, int]:
    """The limits in bytes of entry points that run the backward; arguments as in `memory_of`."""
    if budget is None:
        return {}
    return {entry: budget.limit for entry, chain in _chains(graph, interface).items() if "joint" in chain}


def _known(graph: StepGraph) -> dict[str, Function]:
    """The functions of static sizes."""
    return {name: f for name, f in graph.functions.items() if not f.of_any_size}


def _chains(graph: StepGraph, interface: Interface) -> dict[str, tuple[str, ...]]:
    """The functions that each exported function runs; only of those that run functions, all of static sizes."""
    known = _known(graph)
    chains = {e.symbol: chain_of(e.name, graph) for e in interface.entry_points}
    return {name: chain for name, chain in chains.items() if chain and all(f in known for f in chain)}


def _peak_of_chain(chain: tuple[str, ...], usages: Mapping[str, Usage]) -> int:
    """The peak memory of functions that run one after the other.

    Gradients that a later function reads stay live until the last function is done.
    """
    most = gradients = 0
    for name in chain:
        most = max(most, gradients + usages[name].total)
        gradients += usages[name].left
    return most


def _forward_values(function: Function, grouping: Kernels) -> Iterator[ForwardValue]:
    """The values of the forward pass that are written to memory, and those that the backward recomputes."""
    graph = function.graph.graph
    again = original_names(graph)
    read = {s for b in graph.nodes if is_backward(b) for n in b.all_input_nodes for s in sources(n)}
    for node in graph.nodes:
        if not is_forward(node) or is_view(node) or is_constant(node):
            continue
        decision = "recomputed" if node.name in again else "saved" if node in read else "discarded"
        if decision != "discarded" or (node in grouping.leader and grouping.is_stored(node)):
            yield from _described(node, decision)


def _described(node: Node, decision: str) -> Iterator[ForwardValue]:
    """The record of the value of `node`; for control flow, one record per result."""
    values = torch.utils._pytree.tree_leaves(node.meta["val"])
    for i, value in enumerate(values):
        yield ForwardValue(
            name=node.name if len(values) == 1 else f"{node.name}.{i}",
            operator=str(node.target),
            dtype=numpy_name(value.dtype),
            shape=tuple(value.shape),
            bytes=value.numel() * value.element_size(),
            decision=decision,
            line=_without_folders(line_of(node, otherwise="")),
        )


def _without_folders(line: str) -> str:
    """`file:line: source` without the file's folders, which mean nothing on another machine."""
    file, separator, rest = line.partition(":")
    return PurePath(file).name + separator + rest
