"""Replace the transforms of `torch.func` in an exported graph by the operators that they come to.

Before:
    %open = irongrad_vmap_increment_nesting(8, "error")
    %row = irongrad_add_batch_dim(%x, 0, 1)
    %y = aten.sum.default(%row)
    %z = irongrad_remove_batch_dim(%y, 1, 8, 0)
    %close = irongrad_vmap_decrement_nesting()

After:
    %z = aten.sum.dim_IntList(%x, [1])
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.derivatives import CLOSE, OPEN, SET_GRADIENTS, renamed_outputs, transforms
from irongrad.graph.flat_graph import interpret_regions, regions_of
from irongrad.runtime.errors import UnsupportedOpError

# What torch.autocast is called with; empty where there is none.
Autocast: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Region:
    """A run of nodes that opens levels of `torch.func` and closes them.

    Attributes:
        nodes: the nodes, in order.
        inputs: the nodes before it that it reads.
        outputs: its nodes that others read.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Node]
    outputs: Sequence[Node]


def expand_transforms(program: ExportedProgram) -> None:
    """Replace every run of nodes between levels of `torch.func`, in the program and in its regions.

    Raises:
        UnsupportedOpError: a transform makes a tensor that is no operator's result.
    """
    with renamed_outputs(program):
        _expand(program.graph_module)


def _expand(graph: GraphModule, autocast: Autocast = ()) -> None:
    for node in graph.graph.nodes:
        inner = node.args[:4] if node.target is wrap_with_autocast else autocast
        for region in regions_of(graph, node):
            _expand(region, inner)
    _detach_without_gradients(list(graph.graph.nodes))
    while (region := _first_region(list(graph.graph.nodes))) is not None:
        with torch.autocast(*autocast) if autocast else nullcontext():
            traced = _traced(graph, region)
        _replace(graph, region, traced, autocast)
    graph.recompile()


def _detach_without_gradients(nodes: Sequence[Node]) -> None:
    """Detach what is computed where gradients are disabled and read elsewhere; a trace below autograd forgets that."""
    depth = 0
    begin: tuple[int, int] | None = None  # since when gradients are disabled, and how many levels were open
    for place, node in enumerate(nodes):
        depth += (node.target in OPEN) - (node.target in CLOSE)
        if node.target is not SET_GRADIENTS:
            continue
        if begin is None and not node.args[0]:
            begin = place, depth
        elif begin is not None and begin[1] == depth:
            _detach(nodes[begin[0] : place], node)
            begin = None


def _detach(nodes: Sequence[Node], end: Node) -> None:
    """Detach the tensors among `nodes` that others read; `end` comes after them."""
    own = set(nodes)
    for node in nodes:
        if own.issuperset(node.users) or not isinstance(node.meta.get("val"), Tensor):
            continue
        with node.graph.inserting_before(end):
            detached = node.graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        node.replace_all_uses_with(detached, lambda user, same=detached: user not in own and user is not same)


def _first_region(nodes: Sequence[Node]) -> Region | None:
    places = transforms(nodes)
    if not places:
        return None
    members = nodes[places[0].start : places[0].stop]
    own = set(members)
    inputs = dict.fromkeys(i for node in members for i in node.all_input_nodes if i not in own)
    return Region(members, list(inputs), [node for node in members if not own.issuperset(node.users)])


def _traced(graph: GraphModule, region: Region) -> GraphModule:
    """The operators that a region comes to, recorded below autograd and `torch.func`."""
    body = Graph()
    copies = {node: body.placeholder(node.name) for node in region.inputs}
    for node in region.nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output([copies[node] for node in region.outputs])
    values = [node.meta["val"] for node in region.inputs]
    module = GraphModule(graph, body)
    interpret_regions(module)
    run = Interpreter(module).run
    mode = detect_fake_mode([v for v in values if isinstance(v, Tensor)])
    with mode, enable_python_dispatcher(), preserve_node_meta(), torch.set_grad_enabled(torch.is_grad_enabled()):
        traced = make_fx(run)(*values)
    traced.graph.eliminate_dead_code()
    return traced


def _replace(graph: GraphModule, region: Region, traced: GraphModule, autocast: Autocast) -> None:
    """Put the nodes of `traced` where those of `region` are, in a graph without autocast: they have the casts."""
    body = _without_savings(traced, region, set(_detaches(graph, region.nodes)))
    with graph.graph.inserting_before(region.nodes[0]):
        results = _called(graph, body, region, autocast) if autocast else _inlined(graph, body, region)
    for old, new in zip(region.outputs, results, strict=True):
        old.replace_all_uses_with(new)
    for node in reversed(region.nodes):
        graph.graph.erase_node(node)


def _without_savings(traced: GraphModule, region: Region, own_detaches: Set[str]) -> Graph:
    """Return the graph of `traced` without what the autograd of the region's own derivatives saves."""
    body = Graph()
    copies: dict[Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            raise UnsupportedOpError(f"{line_of(region.nodes[0])}: torch.func makes a constant here")
        if node.target is torch.ops.aten.detach.default and own_detaches.isdisjoint(_sources(node)):
            # Autograd saves a result through detach, which the derivative of this derivative must not see.
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = body.node_copy(node, copies.__getitem__)
    return body


def _inlined(graph: GraphModule, body: Graph, region: Region) -> Sequence[Any]:
    """Copy the nodes of `body` to the current place of `graph`, and return the results."""
    placeholders = (node for node in body.nodes if node.op == "placeholder")
    results = graph.graph.graph_copy(body, dict(zip(placeholders, region.inputs, strict=True)))
    assert isinstance(results, Sequence)
    return results


def _called(graph: GraphModule, body: Graph, region: Region, autocast: Autocast) -> Sequence[Any]:
    """Call `body` at the current place of `graph`, with autocast disabled, and return the results."""
    (name,) = islice((n for n in map("transform_{}".format, count()) if not hasattr(graph, n)), 1)
    setattr(graph, name, GraphModule(graph, body))
    device, dtype, _, cached = autocast
    values = tuple(node.meta["val"] for node in region.outputs)
    call = graph.graph.call_function(
        wrap_with_autocast, (device, dtype, False, cached, graph.graph.get_attr(name), *region.inputs)
    )
    call.meta = dict(region.nodes[-1].meta) | {"val": values}
    results = [graph.graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
    for node, result in zip(region.outputs, results, strict=True):
        result.meta = dict(node.meta)
    return results


def _detaches(graph: GraphModule, nodes: Iterable[Node]) -> Iterator[str]:
    """The names of the nodes that detach a tensor, in regions, too."""
    for node in nodes:
        if node.target is torch.ops.aten.detach.default:
            yield node.name
        for region in regions_of(graph, node):
            yield from _detaches(region, region.graph.nodes)


def _sources(node: Node) -> set[str]:
    """The names of the nodes that `node` was traced from."""
    return {source.name for source in node.meta.get("from_node", ())}
