"""Reading an exported graph as one list of operators, whatever regions torch.export has put them into.

Code under `torch.no_grad()` or `torch.autocast` becomes a graph of its own, called by a higher-order operator; so do
the branches of torch.cond and the bodies of while_loop, scan and map.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

_INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})


class FlatGraph:
    """The nodes of a graph, those inside regions in place of the region.

    Attributes:
        nodes: all nodes in the order of execution: both branches one after the other, and a loop's body once.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.nodes: list[Node] = []
        self._origins: dict[Node, list[Any]] = {}
        self._results: dict[Node, list[list[Any]]] = {}
        self._add(graph)

    def origins(self, value: Any) -> list[Any]:
        """The nodes that compute what `value`, a node or anything else, stands for inside or outside a region.

        The result of a choice stands for that of either branch, what a loop carries for its first value, and a row of
        what it runs over for all of it.
        """
        if not (isinstance(value, Node) and value in self._origins):
            return [value]
        return [origin for same in self._origins[value] for origin in self.origins(same)]

    def _add(self, graph: GraphModule) -> None:
        for node in graph.graph.nodes:
            regions = {i: r for i, a in enumerate(node.args) if (r := region_of(graph, a)) is not None}
            if regions:
                self._enter(node, list(regions.values()), tree_leaves(node.args[max(regions) + 1 :]))
            elif node.target is operator.getitem and node.args[0] in self._results:
                self._origins[node] = self._results[node.args[0]][node.args[1]]
            else:
                self.nodes.append(node)

    def _enter(self, call: Node, regions: Sequence[GraphModule], inputs: Sequence[Any]) -> None:
        for region in regions:
            placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
            self._origins |= {p: [value] for p, value in zip(placeholders, inputs, strict=False)}
            self._add(region)
        alternatives = regions if call.target is torch.ops.higher_order.cond else regions[-1:]
        self._results[call] = [list(same) for same in zip(*map(_outputs, alternatives), strict=True)]


def _outputs(region: GraphModule) -> Sequence[Any]:
    output = region.graph.output_node().args[0]
    return output if isinstance(output, (tuple, list)) else [output]


def region_of(graph: GraphModule, argument: object) -> GraphModule | None:
    """The region of `graph` that an argument of a node names, if it names one."""
    if not (isinstance(argument, Node) and argument.op == "get_attr"):
        return None
    target = getattr(graph, str(argument.target), None)
    return target if isinstance(target, GraphModule) else None


def regions_of(graph: GraphModule, node: Node) -> list[GraphModule]:
    """The regions of `graph` that `node` calls."""
    return [region for argument in node.args if (region := region_of(graph, argument)) is not None]


def is_inlined(node: Node) -> bool:
    """Whether the regions that `node` calls are part of its graph: branches and loops run any number of times."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _INLINED


def interpret_regions(graph: GraphModule) -> None:
    """Have what `graph` runs under `torch.autocast` or `torch.no_grad` keep the user's lines.

    What traces an exported graph interprets it node by node, each with its line, but calls these regions as functions.
    """
    for node in filter(is_inlined, graph.graph.nodes):
        for region in regions_of(graph, node):
            interpret_regions(region)
            region.forward = Interpreter(region).run
