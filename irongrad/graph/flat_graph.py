"""Read an exported graph as one list of operators, whatever regions torch.export has put them into.

torch.export puts code under `torch.no_grad()` or `torch.autocast` into a graph of its own, which a higher-order
operator calls. It does the same with the branches of torch.cond and the bodies of while_loop, scan and map.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

_INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})


@dataclass(frozen=True)
class Carry:
    """What a placeholder of a loop's body holds: at first the initial value, then what an iteration hands on.

    Attributes:
        initial: the initial value.
        handed: what the body hands on.
        condition: what the loop asks before each iteration; None if it asks nothing.
        asked: the placeholder of the condition that holds the same value.
        trips: the number of iterations; None if it is not known.
    """

    initial: Any
    handed: Any
    condition: Any = None
    asked: Node | None = None
    trips: int | None = None


class FlatGraph:
    """The nodes of a graph, with every region replaced by the nodes inside it.

    Attributes:
        nodes: all nodes in order of execution. Both branches of a cond are listed, one after the other, and a loop's
            body once.
        carried: the placeholders of loop bodies whose values one iteration hands on to the next.
        carries: what they hold, for while_loop and scan.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.nodes: list[Node] = []
        self.carried: set[Node] = set()
        self.carries: dict[Node, Carry] = {}
        self._origins: dict[Node, list[Any]] = {}
        self._results: dict[Node, list[list[Any]]] = {}
        self._add(graph)

    def origins(self, value: Any) -> list[Any]:
        """Return the nodes that compute `value`, a node or any other argument, through the borders of regions.

        The result of a cond has the origins of both branches. A loop's carry has those of its initial value. A row of a
        sequence has those of the whole sequence. The final carry of a loop has those of its initial value, and of what
        an iteration hands on.
        """
        return self._through(value, frozenset())

    def makers(self, value: Any) -> list[Any]:
        """Return the nodes that compute `value`, as `origins` does; a carry inside of its loop is its own."""
        return self._through(value, self.carried)

    def _through(self, value: Any, ends: Collection[Node]) -> list[Any]:
        if not (isinstance(value, Node) and value in self._origins) or value in ends:
            return [value]
        return [origin for same in self._origins[value] for origin in self._through(same, ends)]

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
        carried = _carried(call, inputs)
        for region in regions:
            placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
            self._origins |= {p: [value] for p, value in zip(placeholders, inputs, strict=False)}
            self.carried |= set(placeholders[:carried])
            self._add(region)
        if call.target in _HANDS_ON:
            self.carries |= _carries(regions, inputs, carried)
        alternatives = regions if call.target is torch.ops.higher_order.cond else regions[-1:]
        results = [list(same) for same in zip(*map(_outputs, alternatives), strict=True)]
        if call.target in _HANDS_ON:
            results = [[start, *made] for start, made in zip(inputs[:carried], results, strict=False)] + results[
                carried:
            ]
        self._results[call] = results


# Loops whose first results are the final values of what they hand on.
_HANDS_ON = (torch.ops.higher_order.while_loop, torch.ops.higher_order.scan)


def _carried(call: Node, inputs: Sequence[Any]) -> int:
    """How many of a region's arguments a loop hands on from one iteration to the next."""
    if call.target is torch.ops.higher_order.associative_scan:
        return len(inputs) * 2  # a region combines two elements of each sequence
    if call.target not in _HANDS_ON:
        return 0
    first = next(a for a in call.args if isinstance(a, list | tuple))
    return len(first)


def _carries(regions: Sequence[GraphModule], inputs: Sequence[Any], count: int) -> dict[Node, Carry]:
    """The carries of a while_loop, which has a condition and a body, or of a scan, which has a body."""
    *conditions, body = regions
    held = [n for n in body.graph.nodes if n.op == "placeholder"][:count]
    values = zip(held, inputs, _outputs(body), strict=False)
    if not conditions:
        rows = inputs[count].meta["val"].shape[0] if len(inputs) > count else None
        trips = rows if isinstance(rows, int) else None
        return {p: Carry(initial, handed, trips=trips) for p, initial, handed in values}
    asked = [n for n in conditions[0].graph.nodes if n.op == "placeholder"][:count]
    (answer,) = _outputs(conditions[0])
    return {p: Carry(initial, handed, answer, a) for (p, initial, handed), a in zip(values, asked, strict=True)}


def _outputs(region: GraphModule) -> Sequence[Any]:
    output = region.graph.output_node().args[0]
    return output if isinstance(output, (tuple, list)) else [output]


def region_of(graph: GraphModule, argument: object) -> GraphModule | None:
    """Return the region of `graph` that an argument of a node names; None if it names none."""
    if not (isinstance(argument, Node) and argument.op == "get_attr"):
        return None
    target = getattr(graph, str(argument.target), None)
    return target if isinstance(target, GraphModule) else None


def regions_of(graph: GraphModule, node: Node) -> list[GraphModule]:
    """Return the regions of `graph` that `node` calls."""
    return [region for argument in node.args if (region := region_of(graph, argument)) is not None]


def is_inlined(node: Node) -> bool:
    """Whether the regions that `node` calls are part of its graph.

    Branches and loops are not: they run any number of times.
    """
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _INLINED


def interpret_regions(graph: GraphModule) -> None:
    """Make the nodes that `graph` runs under `torch.autocast` or `torch.no_grad` keep the user's lines.

    A tracer interprets an exported graph node by node, with the line of each node. But it calls these regions as plain
    functions, unless they are interpreted too.
    """
    for node in filter(is_inlined, graph.graph.nodes):
        for region in regions_of(graph, node):
            interpret_regions(region)
            region.forward = Interpreter(region).run
