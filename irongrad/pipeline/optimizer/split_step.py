"""Cut the joint graph of a step between the model and the loss, because only Python can compute a part in between.

`forward` computes the model's outputs. `finish` computes everything else: the loss, the gradients and the new state.
The values of `forward` that `finish` reads are *saved* in globals of the module. So only views and constants are
computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.memory_model.kernel_roles import is_constant, is_view


def cut(graph: StepGraph, between: Sequence[str]) -> StepGraph:
    """Return `graph` with `forward` and `finish` in place of `joint`; `graph` itself if `between` is empty."""
    if not between:
        return graph
    forward, finish = pieces_of(graph.functions["joint"])
    rest = {name: f for name, f in graph.functions.items() if name != "joint"}
    return replace(graph, functions={"forward": forward, "finish": finish, **rest})


def pieces_of(joint: Function) -> tuple[Function, Function]:
    """Split `joint` into a function for its outputs except the loss, and a function for its other results."""
    arguments = dict(zip(_placeholders(joint.graph), joint.arguments, strict=True))
    results = dict(zip(joint.results, _results(joint.graph), strict=True))
    early = {v: n for v, n in results.items() if v.kind == "output" and v.name != "loss"}
    late = {v: n for v, n in results.items() if v not in early}
    border = _border(_with_parts(_ancestors(early.values(), ())), late.values(), arguments)
    saved = {Value("saved", n.name): n for n in border}
    source = _Source(joint.graph, arguments)
    first = source.extracted(early | saved, {})
    return first, source.extracted(late, {node: value for value, node in saved.items()})


def _placeholders(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _results(graph: GraphModule) -> list[Node]:
    nodes: list[Node] = list(graph.graph.output_node().args[0])
    return nodes


def _ancestors(nodes: Iterable[Node], stops: Iterable[Node]) -> list[Node]:
    """`nodes` and all nodes that they are computed from, up to and including `stops`."""
    ends, found, waiting = set(stops), dict[Node, None](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [] if node in ends else node.all_input_nodes
    return list(found)


def _with_parts(nodes: Iterable[Node]) -> set[Node]:
    """`nodes`, and the single results of those that have several."""
    known = set(nodes)
    return known | {user for node in known for user in node.users if user.target is operator.getitem}


def _border(early: set[Node], late: Iterable[Node], arguments: Mapping[Node, Value]) -> list[Node]:
    """The values of `early` that have to be saved to compute the nodes of `late`, in the order of the graph."""
    found: dict[Node, None] = {}
    waiting, seen = list(late), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        again = is_constant(node) or (is_view(node) and node.target is not operator.getitem)
        if node in early and not again and not _is_state(node, arguments):
            found[node] = None
        else:
            waiting += node.all_input_nodes
    order = {n: i for i, n in enumerate(next(iter(arguments)).graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _is_state(node: Node, arguments: Mapping[Node, Value]) -> bool:
    return node in arguments and arguments[node].kind != "input"


@dataclass(frozen=True)
class _Source:
    """A graph from which functions are extracted.

    Attributes:
        graph: the graph.
        arguments: what its placeholders stand for.
    """

    graph: GraphModule
    arguments: Mapping[Node, Value]

    def extracted(self, results: Mapping[Value, Node], known: Mapping[Node, Value]) -> Function:
        """Return the function that computes `results` from arguments, and from the nodes in `known`."""
        needed = set(_ancestors(results.values(), known))
        taken = {n: v for n, v in {**self.arguments, **known}.items() if n in needed}
        new_graph, new = Graph(), dict[Node, Node]()
        for node in taken:
            new[node] = new_graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in self.graph.graph.nodes:
            if node in needed and node not in new:
                new[node] = new_graph.node_copy(node, new.__getitem__)
        output: Any = new_graph.output([new[n] for n in results.values()])
        output.meta = dict(self.graph.graph.output_node().meta)
        return Function(GraphModule(self.graph, new_graph), tuple(taken.values()), tuple(results))
