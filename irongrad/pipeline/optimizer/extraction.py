"""Extract a function from a step graph's function: some of its results, from arguments and from known values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from irongrad.graph.step_graph import Function, Value


def ancestors(nodes: Iterable[Node], stops: Iterable[Node]) -> list[Node]:
    """`nodes` and all nodes that they are computed from, up to and including `stops`."""
    ends, found, waiting = set(stops), dict[Node, None](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [] if node in ends else node.all_input_nodes
    return list(found)


def results_of(function: Function) -> dict[Value, Node]:
    """The node of each result of a function."""
    return dict(zip(function.results, function.graph.graph.output_node().args[0], strict=True))


@dataclass(frozen=True)
class Source:
    """A graph from which functions are extracted.

    Attributes:
        graph: the graph.
        arguments: what its placeholders stand for.
    """

    graph: GraphModule
    arguments: Mapping[Node, Value]

    @classmethod
    def of(cls, function: Function) -> Source:
        """The graph of a function."""
        placeholders = (n for n in function.graph.graph.nodes if n.op == "placeholder")
        return cls(function.graph, dict(zip(placeholders, function.arguments, strict=True)))

    def extracted(self, results: Mapping[Value, Node], known: Mapping[Node, Value]) -> Function:
        """Return the function that computes `results` from arguments, and from the nodes in `known`."""
        needed = set(ancestors(results.values(), known))
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
