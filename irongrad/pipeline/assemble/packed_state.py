"""Packs: state tensors and gradients that the update concatenates are stored concatenated.

`irongrad.passes.graph.multi_tensor` makes the update read state tensors as parts of one concatenation, and write them
as the same parts of one result. Such tensors are stored back to back in one tensor, a pack. The update reads and writes
the pack as a whole. The other functions read slices of it, which need no copies. Gradients are packed as they are
computed: IREE lets their kernels write directly into the pack.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.graph.step_graph import Function, Pack, StepGraph, Value

aten = torch.ops.aten


def pack_together(graphs: Mapping[str, StepGraph]) -> dict[str, StepGraph]:
    """Pack the state of several steps, so that all of them know where each tensor is."""
    packed: dict[str, StepGraph] = {}
    state: tuple[Pack, ...] = ()
    for name, graph in graphs.items():
        packed[name] = pack_state(graph, {member for pack in state for member in pack.starts})
        state += tuple(p for p in packed[name].packs if p.holds_state)
    return {
        name: replace(graph, packs=(*state, *(p for p in graph.packs if not p.holds_state)))
        for name, graph in packed.items()
    }


def pack_state(graph: StepGraph, taken: Collection[Value] = ()) -> StepGraph:
    """Pack the state tensors and the gradients that the update reads as one concatenation.

    Args:
        graph: the step graph.
        taken: the state that is in a pack already.
    """
    update = graph.functions.get("update")
    if update is None or graph.shards:  # a pack would hold tensors of several ranks
        return graph
    function, packs = _packed_update(replace(update, graph=copy.deepcopy(update.graph)), graph.prefix, taken)
    source = next((f for n in ("joint", "finish") if (f := graph.functions.get(n)) is not None), None)
    # IREE 3.13.0 lets a kernel write directly into a pack only if it runs after the kernels of the members put there
    # before (compiler/src/iree/compiler/Dialect/Stream/Transforms/EmplaceAllocations.cpp).
    order = source.order_of_results if source is not None else {}
    packs = tuple(replace(p, starts=dict(sorted(p.starts.items(), key=lambda i: order.get(i[0], 0)))) for p in packs)
    return replace(graph, functions={**graph.functions, "update": function}, packs=packs)


def _packed_update(function: Function, prefix: str, taken: Collection[Value]) -> tuple[Function, tuple[Pack, ...]]:
    fx = function.graph.graph
    output = fx.output_node()
    arguments = {n: v for n, v in zip(fx.nodes, function.arguments, strict=False) if n.op == "placeholder"}
    results = dict(zip(function.results, output.args[0], strict=True))
    packs: list[Pack] = []
    for node in list(fx.nodes):
        starts = _starts(node, arguments)
        written = _written(starts, results)
        if not starts or set(taken) & set(starts) or (written is None and any(v.kind == "state" for v in starts)):
            continue
        value = Value("pack", f"{prefix}{len(packs)}")
        packs.append(Pack(value.name, starts, node.meta["val"].numel()))
        with fx.inserting_before(next(iter(arguments))):
            whole = fx.placeholder(f"pack_{value.name.replace('.', '_')}")
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
    """The offsets, in elements, of the arguments that `node` concatenates; empty if they cannot be packed.

    A pack has state tensors only, or gradients only, and they have no other use.
    """
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
    """The value that `part` is made of by reshapes and zero padding at the end."""
    while part.target in (aten.constant_pad_nd.default, aten.reshape.default) and len(part.users) == 1:
        (part,) = part.all_input_nodes
    return part


def _written(starts: Mapping[Value, int], results: Mapping[Value, Node]) -> Node | None:
    """The one value whose slices are the new values of a pack's members; None if there is none."""
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
