"""Cut the joint graph of a step between the model and the loss, because only Python can compute a part in between.

`forward` computes the model's outputs. `finish` computes everything else: the loss, the gradients and the new state.
The values of `forward` that `finish` reads are *saved* in globals of the module. So only views and constants are
computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.memory_model.kernel_roles import is_constant, is_view
from irongrad.pipeline.optimizer.extraction import Source, ancestors, results_of


def cut(graph: StepGraph, between: Sequence[str]) -> StepGraph:
    """Return `graph` with `forward` and `finish` in place of `joint`; `graph` itself if `between` is empty."""
    if not between:
        return graph
    forward, finish = pieces_of(graph.functions["joint"])
    rest = {name: f for name, f in graph.functions.items() if name != "joint"}
    return replace(graph, functions={"forward": forward, "finish": finish, **rest})


def pieces_of(joint: Function) -> tuple[Function, Function]:
    """Split `joint` into a function for its outputs except the loss, and a function for its other results."""
    source, results = Source.of(joint), results_of(joint)
    early = {v: n for v, n in results.items() if v.kind == "output" and v.name != "loss"}
    late = {v: n for v, n in results.items() if v not in early}
    border = _border(_with_parts(ancestors(early.values(), ())), late.values(), source.arguments)
    saved = {Value("saved", n.name): n for n in border}
    first = source.extracted(early | saved, {})
    return first, source.extracted(late, {node: value for value, node in saved.items()})


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
