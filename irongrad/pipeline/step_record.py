"""StepGraph -> Analysis: the operators of a captured step, what the passes changed, and its memory over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from irongrad.analysis.records import FORMAT_VERSION, Analysis, Buffer, Operator, PassChange, Source, Timeline
from irongrad.graph.dtypes import numpy_name
from irongrad.graph.sources import place_of, source_of
from irongrad.graph.step_graph import StepGraph, base_name
from irongrad.memory_model.kernel_roles import (
    bodies_of,
    bytes_in,
    is_constant,
    is_control,
    is_item,
    is_view,
    shape_of,
    source,
    tensors_in,
)
from irongrad.memory_model.liveness import Usage
from irongrad.memory_model.loops_and_branches import iterations_of
from irongrad.memory_model.node_costs import flops, has_flops
from irongrad.passes import PassRecord
from irongrad.passes.recompute import is_recomputed
from irongrad.pipeline.assemble.interface import Interface, chain_of
from irongrad.sizes.buckets import smallest
from irongrad.sizes.symbols import has_symbols
from irongrad.step.varying_sizes import sizes_in


@dataclass
class _Table:
    """The sources so far, each with an index, and the texts of the user's lines."""

    indices: dict[Source, int] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    def index(self, function: str, node: Node, prefix: str) -> int:
        place, text = place_of(node)
        if text:
            self.lines[place] = text
        return self.indices.setdefault(source_of(function, node, prefix), len(self.indices))


def step_record(
    captured: Mapping[str, StepGraph],
    optimised: Mapping[str, StepGraph],
    interfaces: Mapping[str, Interface],
    passes: Sequence[PassRecord],
    usages: Mapping[str, Mapping[str, Usage]],
) -> Analysis:
    """Record a step, without its targets.

    Args:
        captured: the step graph of each step before any pass, by the step's name.
        optimised: the same after the passes.
        interfaces: their entry points.
        passes: the record of each pass on each function.
        usages: the memory of each function of static sizes, by the step's name.
    """
    table = _Table()
    operators = [
        operator
        for graph in captured.values()
        for name, function in graph.functions.items()
        for operator in _operators(function.graph.graph, name, graph.prefix, table)
    ]
    timelines = [
        _timeline(name, graph.prefix, used, table)
        for step, graph in optimised.items()
        for name, used in usages[step].items()
    ]
    changes = tuple(PassChange(r.name, r.function, *r.nodes, counts=dict(r.stats)) for r in passes if r.changed)
    chains = {
        entry.symbol: _chain(entry.name, graph)
        for name, graph in captured.items()
        for entry in interfaces[name].entry_points
    }
    return Analysis(
        FORMAT_VERSION,
        tuple(table.indices),
        table.lines,
        {entry: chain for entry, chain in chains.items() if chain},
        tuple(operators),
        changes,
        tuple(timelines),
        other_sizes=tuple(
            graph.prefix + f
            for graph in captured.values()
            for f in graph.functions
            if _for_example(base_name(f), graph) != f
        ),
    )


def _chain(entry: str, graph: StepGraph) -> tuple[str, ...]:
    """The functions that an entry point runs on the example; those of micro-batches as often as there are any."""
    chain = chain_of(entry, graph) or ((entry,) if entry in graph.functions else ())
    often = graph.accumulate if "accumulate" in chain else 1
    return tuple(
        graph.prefix + _for_example(f, graph)
        for f in chain
        for _ in range(often if f in ("joint", "accumulate") else 1)
    )


def _for_example(function: str, graph: StepGraph) -> str:
    """The version of a function that the example's sizes take."""
    if not graph.buckets:
        return function
    return graph.in_bucket(function, smallest(graph.buckets, sizes_in(graph.dynamic, graph.inputs)))


def _operators(
    graph: Graph, function: str, prefix: str, table: _Table, inside: str = "", times: int = 1
) -> Iterator[Operator]:
    """The operators of a graph and of its bodies; `inside` begins the names of those in a body, run `times` times."""
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or is_constant(node) or is_item(node):
            continue
        if is_control(node):
            for number, body in enumerate(bodies_of(node)):
                name = f"{inside}{node.name}.{number}."
                yield from _operators(body, function, prefix, table, name, times * iterations_of(node))
            continue
        operands = list(dict.fromkeys(source(n) for n in node.all_input_nodes))
        value = _at_example(node)
        results = tensors_in(value)
        seen = (value, *map(_at_example, node.all_input_nodes))
        known = not any(has_symbols(tensor) for one in seen for tensor in tensors_in(one))
        yield Operator(
            name=inside + node.name,
            source=table.index(function, node, prefix),
            dtype=_dtype(value),
            shape=tuple(results[0].shape) if known and results else (),
            flops=flops(node, _at_example) if known else None if has_flops(node) else 0,
            elements=sum(v.numel() for v in results) if known else 0,
            read=sum(bytes_in(_at_example(n)) for n in operands) if known else 0,
            written=bytes_in(value) if known else 0,
            times=times,
            inputs=tuple(inside + n.name for n in operands if n.op == "call_function"),
        )


def _at_example(node: Node) -> Any:
    """The fake value of a node, with the sizes of the example; sizes that depend on data remain symbols."""
    return torch.utils._pytree.tree_map(_sized, node.meta.get("val"))


def _sized(value: object) -> object:
    if isinstance(value, torch.SymInt):
        return value if value.node.hint is None else value.node.hint
    if not isinstance(value, torch.Tensor) or not has_symbols(value):
        return value
    shape = [_sized(size) for size in value.shape]
    known = all(isinstance(size, int) for size in shape)
    return torch.empty(shape, dtype=value.dtype, device="meta") if known else value


def _dtype(value: object) -> str:
    """numpy's name of the element type of the first tensor in a value; empty if there is none."""
    return next((numpy_name(tensor.dtype) for tensor in tensors_in(value)), "")


def _timeline(function: str, prefix: str, used: Usage, table: _Table) -> Timeline:
    return Timeline(
        prefix + function,
        tuple(tuple(n.name for n in computed) for computed in used.computed),
        tuple(
            Buffer(
                item.node.name,
                table.index(function, item.node, prefix),
                _dtype(item.node.meta["val"]),
                tuple(shape_of(item.node)),
                item.bytes,
                item.start,
                item.end,
                is_recomputed(item.node),
            )
            for item in used.lifetimes
        ),
        used.peak,
        used.total,
    )
