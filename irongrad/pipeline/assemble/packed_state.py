"""Storing state as the update concatenates it.

Where the update reads state tensors as parts of one concatenation, and writes them as the same parts of one result, as
`irongrad.passes.graph.multi_tensor` has it, they are stored one after the other in one tensor that it reads and writes
as a whole. The other functions read slices, which are no copies. Gradients are concatenated as they are computed: IREE
has their kernels write to their places.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.graph.step_graph import Function, Pack, StepGraph, Value

aten = torch.ops.aten


def pack_state(graph: StepGraph) -> StepGraph:
    """Store together what the update reads and writes together."""
    update = graph.functions.get("update")
    if update is None:
        return graph
    function, packs = _packed(replace(update, graph=copy.deepcopy(update.graph)))
    source = next((f for n in ("joint", "finish") if (f := graph.functions.get(n)) is not None), None)
    turns = _turns(source) if source is not None else {}
    packs = tuple(replace(p, starts=dict(sorted(p.starts.items(), key=lambda i: turns.get(i[0], 0)))) for p in packs)
    return replace(graph, functions={**graph.functions, "update": function}, packs=packs)


def _turns(function: Function) -> dict[Value, int]:
    """When each result is computed.

    IREE 3.13.0 has a kernel write to its place in a whole only after those that the whole was given before
    (compiler/src/iree/compiler/Dialect/Stream/Transforms/EmplaceAllocations.cpp).
    """
    turn = {n: i for i, n in enumerate(function.graph.graph.nodes)}
    results = function.graph.graph.output_node().args[0]
    return {v: turn[n] for v, n in zip(function.results, results, strict=True)}


def _packed(function: Function) -> tuple[Function, tuple[Pack, ...]]:
    fx = function.graph.graph
    output = fx.output_node()
    arguments = {n: v for n, v in zip(fx.nodes, function.arguments, strict=False) if n.op == "placeholder"}
    results = dict(zip(function.results, output.args[0], strict=True))
    packs: list[Pack] = []
    for node in list(fx.nodes):
        starts = _starts(node, arguments)
        written = _written(starts, results)
        if not starts or (written is None and any(v.kind == "state" for v in starts)):
            continue
        value = Value("pack", str(len(packs)))
        packs.append(Pack(value.name, starts, node.meta["val"].numel()))
        with fx.inserting_before(next(iter(arguments))):
            whole = fx.placeholder(f"pack_{value.name}")
        whole.meta["val"] = node.meta["val"]
        arguments = {whole: value, **arguments}
        node.replace_all_uses_with(whole)
        if written is not None:
            results = {value: written, **{v: n for v, n in results.items() if v not in starts}}
    output.args = (list(results.values()),)
    eliminate_dead_code(function.graph)
    for placeholder in [n for n, v in arguments.items() if any(v in p.starts for p in packs)]:
        fx.erase_node(placeholder)
        del arguments[placeholder]
    function.graph.recompile()
    return replace(function, arguments=tuple(arguments.values()), results=tuple(results)), tuple(packs)


def _starts(node: Node, arguments: Mapping[Node, Value]) -> dict[Value, int]:
    """Where the arguments begin that `node` concatenates: all state or all gradients, and used for that alone."""
    if node.target is not aten.cat.default or node.args[1:] not in ((), (0,)):
        return {}
    starts: dict[Value, int] = {}
    start = 0
    for part in node.args[0]:
        source = _source(part)
        if source not in arguments or len(source.users) != 1 or arguments[source] in starts:
            return {}
        starts[arguments[source]] = start
        start += part.meta["val"].numel()
    return starts if {v.kind for v in starts} in ({"state"}, {"gradient"}) else {}


def _source(part: Node) -> Node:
    """What `part` is with another shape, and with zeros behind it."""
    while part.target in (aten.constant_pad_nd.default, aten.reshape.default) and len(part.users) == 1:
        (part,) = part.all_input_nodes
    return part


def _written(starts: Mapping[Value, int], results: Mapping[Value, Node]) -> Node | None:
    """The value of which the new values of the members of a pack are the slices."""
    sources: set[Any] = set()
    for member, start in starts.items():
        result = results.get(member)
        if result is None:
            return None
        part = result.all_input_nodes[0] if result.target is aten.reshape.default else result
        if part.target is not aten.slice.Tensor or part.args[1:] != (0, start, start + result.meta["val"].numel()):
            return None
        sources.add(part.args[0])
    return sources.pop() if len(sources) == 1 else None
