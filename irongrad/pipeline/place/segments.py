"""Cut a function into segments, each of which one part computes.

The segments run one after the other. A segment takes what it needs from the state of its part, from the arguments of
the function, and from earlier segments. Views and free nodes are computed again in every segment that reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from irongrad.graph.nodes import call
from irongrad.graph.step_graph import Function, Value
from irongrad.memory_model.kernel_roles import is_view
from irongrad.pipeline.optimizer.extraction import Source, results_of

aten = torch.ops.aten

# What a part stores; everything else that a function returns is given to the caller.
STORED = ("state", "accumulator")


@dataclass
class _Segment:
    """A segment that is being made.

    Attributes:
        part: the number of the part.
        nodes: the nodes that it computes.
        stored: the values that it stores, each by the node that computes it.
    """

    part: int
    nodes: set[Node] = field(default_factory=set)
    stored: dict[Value, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A segment of a function.

    Attributes:
        part: the number of the part that computes it.
        function: the segment as a function. Values of kind `passed` come from earlier segments or go to later ones.
    """

    part: int
    function: Function


def segments_of(function: Function, owners: Mapping[Node, int], holders: Mapping[str, Sequence[int]]) -> list[Segment]:
    """Cut `function`, which is changed in place.

    Args:
        function: the function.
        owners: the number of the part of each node that is not free.
        holders: the numbers of the parts that hold each state tensor; of an accumulator, those of its parameter.
    """
    placed = dict(owners)
    _copy_foreign_state(function, placed)
    made = _scheduled(function, placed) or [_Segment(0)]
    results = results_of(function)
    numbers = {node: number for number, segment in enumerate(made) for node in segment.nodes}
    index = {node: numbers[node] for node in function.graph.graph.nodes if node in numbers}
    _delay(function, made, index)
    for value, node in results.items():
        if value.kind in STORED:
            for part in holders[value.name]:
                made[_last(function, made, index, placed, part, value, node)].stored[value] = node
    given = {value: node for value, node in results.items() if value.kind not in STORED}
    return _extracted(function, made, index, given)


def _copy_foreign_state(function: Function, owners: dict[Node, int]) -> None:
    """Have a part copy those of its tensors that other parts read."""
    for node in function.graph.graph.find_nodes(op="placeholder"):
        readers = [user for user in node.users if node in owners and owners.get(user, owners[node]) != owners[node]]
        if not readers:
            continue
        with function.graph.graph.inserting_before(_first_operator(function)):
            copied = call(function.graph.graph, aten.clone.default, node, like=node)
        owners[copied] = owners[node]
        for reader in readers:
            if reader.op != "output":
                reader.replace_input_with(node, copied)


def _first_operator(function: Function) -> Node:
    return next(n for n in function.graph.graph.nodes if n.op != "placeholder")


def _scheduled(function: Function, owners: Mapping[Node, int]) -> list[_Segment]:
    """Group the nodes that are not free: as many as possible for one part, then for the part of the next node."""
    waiting = [n for n in function.graph.graph.nodes if n in owners and n.op != "placeholder"]
    unmade, made = set(waiting), list[_Segment]()
    while waiting:
        segment = _Segment(owners[waiting[0]])
        left: list[Node] = []
        for node in waiting:
            if owners[node] == segment.part and not any(n in unmade for n in node.all_input_nodes):
                segment.nodes.add(node)
                unmade.discard(node)
            else:
                left.append(node)
        made.append(segment)
        waiting = left
    return made


def _delay(function: Function, made: Sequence[_Segment], index: dict[Node, int]) -> None:
    """Move what depends on no input of the step, such as the decay of a moment, to the last segment that can have it.

    It would be passed from there to where it is read otherwise.
    """
    arguments = dict(zip(function.graph.graph.find_nodes(op="placeholder"), function.arguments, strict=True))
    depends: set[Node] = set()
    for node in function.graph.graph.nodes:
        own = node in arguments and arguments[node].kind == "input"
        if own or any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    for node in reversed([n for n in index if n not in depends]):
        part = made[index[node]].part
        ends = [index[u] - (made[index[u]].part != part) for u in node.users if u in index]
        later = [n for n in range(index[node], min(ends, default=index[node]) + 1) if made[n].part == part]
        made[index[node]].nodes.discard(node)
        index[node] = later[-1]
        made[later[-1]].nodes.add(node)


def _last(
    function: Function,
    made: list[_Segment],
    index: Mapping[Node, int],
    owners: Mapping[Node, int],
    part: int,
    value: Value,
    node: Node,
) -> int:
    """The number of the segment of `part` that stores `value`: the first that knows it and follows its last reader."""
    known = index.get(node, -1)
    old = next(
        (
            n
            for n, v in zip(function.graph.graph.find_nodes(op="placeholder"), function.arguments, strict=True)
            if v == value
        ),
        None,
    )
    read = max((index[n] for n in _readers(old, owners) if n in index and made[index[n]].part == part), default=-1)
    for number, segment in enumerate(made):
        if segment.part == part and number >= max(known, read):
            return number
    made.append(_Segment(part))
    return len(made) - 1


def _readers(node: Node | None, owners: Mapping[Node, int]) -> Iterator[Node]:
    """The nodes that read a placeholder, also through free nodes and views, which any reader computes again."""
    waiting, seen = [node] if node is not None else [], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if user not in owners or _is_again(user):
                    waiting.append(user)


def _is_again(node: Node) -> bool:
    """Whether a view is computed again, in place of passing it on."""
    return is_view(node) and node.target is not operator.getitem


def _base(node: Node) -> Node:
    """What a view is a view of."""
    while _is_again(node):
        node = node.all_input_nodes[0]
    return node


def _extracted(
    function: Function, made: Sequence[_Segment], index: Mapping[Node, int], given: Mapping[Value, Node]
) -> list[Segment]:
    """Make the functions of the segments, from the last to the first: what a later one needs, an earlier one gives."""
    source = Source.of(function)
    wanted: dict[Node, None] = {}
    found: list[Segment] = []
    for number, segment in reversed([*enumerate(made)]):
        own = {v: n for v, n in given.items() if index.get(n, len(made) - 1) == number}
        passed = {Value("passed", n.name): n for n in wanted if index.get(n) == number}
        roots = {**passed, **own, **segment.stored}
        known = {n: Value("passed", n.name) for n in _border(roots.values(), number, index, made)}
        for node in [n for n in wanted if index.get(n) == number]:
            del wanted[node]
        wanted |= dict.fromkeys(known)
        if roots:
            found.append(Segment(segment.part, source.extracted(roots, known)))
    return found[::-1]


def _border(
    roots: Iterable[Node], number: int, index: Mapping[Node, int], made: Sequence[_Segment]
) -> dict[Node, None]:
    """The nodes of earlier segments that are needed for the nodes `roots` of segment `number`."""
    border: dict[Node, None] = {}
    waiting, seen = list(roots), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        other = index.get(node, number)
        again = _is_again(node) and (made[other].part == made[number].part or _base(node).op != "placeholder")
        if other != number and not again:
            border[node] = None
        else:
            waiting += node.all_input_nodes
    return border
