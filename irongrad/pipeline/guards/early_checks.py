"""Graphs that compute indices from inputs and constants alone, and how far they are out of range.

An entry point runs them at the start of a call. They read indices themselves, which are in range only if the same call
passes its other checks. So each is clamped where it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from irongrad.graph.step_graph import Range
from irongrad.operators.random import is_random
from irongrad.pipeline.guards.bound_rules.registry import expression_of
from irongrad.pipeline.guards.index_ranges import is_within
from irongrad.pipeline.guards.index_uses import Assertion, Use, uses_of
from irongrad.pipeline.guards.value_bounds import Bounds

aten = torch.ops.aten

_SIGN = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Part:
    """The part of a program that a check may compute.

    Attributes:
        graph: the program; it is functional.
        given: the placeholders of inputs and constants.
        bounds: the bounds of its nodes, whatever the inputs are: a check runs beside those of the inputs.
    """

    graph: GraphModule
    given: Collection[Node]
    bounds: Bounds

    def why_not(self, use: Use) -> str | None:
        """Say why an index cannot be computed early; None if it can be."""
        if use.index.graph is not self.graph.graph:
            return "is computed in a branch or a loop"
        if use.from_end and isinstance(use.size, torch.SymInt) and self.size(use.size) is None:
            return "goes into a dimension whose size no input has"
        return next(filter(None, map(self._why_not, self.needed([use.index]))), None)

    def settles(self, use: Use, limit: Range) -> bool:
        """Whether an index depends on nothing, and is in range."""
        if any(node.op != "call_function" for node in self.needed([use.index])) or self.why_not(use) is not None:
            return False
        with torch.no_grad(), _disable_current_modes():
            (far,) = torch.fx.Interpreter(distances(self, [(use, limit)])).run()
        return 0 <= int(far) <= limit.maximum - limit.minimum

    def _why_not(self, node: Node) -> str | None:
        if node.op == "placeholder":
            return None if node in self.given else "depends on parameters, or on buffers that a step writes"
        if node.op == "get_attr":
            return None
        if is_random(node.target):
            return "depends on random numbers"
        if not isinstance(node.target, torch._ops.OpOverload) and not _is_python(node):
            return "depends on the result of a branch or a loop"
        uses = [use for use in uses_of(node) if not is_within(use, self.bounds)]
        if any(isinstance(use.limit, torch.SymInt) for use in uses):
            return "depends on another index into a dimension that varies"
        return None

    def size(self, wanted: Any) -> tuple[Node, int] | None:
        """The input and its dimension that have a symbolic size; None if there are none."""
        for node in self.given:
            value = node.meta["val"]
            for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and expression_of(size) == expression_of(wanted):
                    return node, d
        return None

    def needed(self, nodes: Iterable[Node]) -> list[Node]:
        """All nodes that `nodes` are computed from, in the order of the graph; sizes come from inputs if possible."""
        found, waiting = set[Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                place = self.size(value) if isinstance(value := node.meta.get("val"), torch.SymInt) else None
                waiting += [place[0]] if place is not None else node.all_input_nodes
        return [node for node in self.graph.graph.nodes if node in found]


def _is_python(node: Node) -> bool:
    """Whether a node is Python arithmetic on sizes, or takes one of several results."""
    return node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def distances(part: Part, checks: Sequence[tuple[Use, Range]], keep: Collection[Node] = ()) -> GraphModule:
    """Return a graph that computes how far indices are from the minimum of their range; see `most_out_of_range`.

    Args:
        part: the program.
        checks: the indices and their ranges, in the order of the results.
        keep: placeholders that the graph has even if it does not need them.
    """
    writer = _Writer(part)
    wanted = part.needed(use.index for use, _ in checks)
    sizes = [found[0] for use, _ in checks if (found := part.size(use.size) if _is_symbolic(use.size) else None)]
    for node in part.graph.graph.nodes:
        if node in wanted or node in keep or node in sizes:
            writer.copy(node)
    writer.graph.output([writer.distance(use, limit) for use, limit in checks])
    made = GraphModule(part.graph, writer.graph)
    made.graph.lint()
    return made


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


class _Writer:
    """Writes the nodes of a check into a graph of its own."""

    def __init__(self, part: Part) -> None:
        self.graph = Graph()
        self._part = part
        self._new: dict[Node, Node] = {}
        values = [n.meta.get("val") for n in part.graph.graph.nodes if n.op == "placeholder"]
        self._mode = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])

    def copy(self, node: Node) -> None:
        """Copy a node of the program, with each index clamped that is not proved to be in range."""
        value = node.meta.get("val")
        place = self._part.size(value) if isinstance(value, torch.SymInt) else None
        if place is not None:
            self._new[node] = self._size(*place)
            return
        self._new[node] = self.graph.node_copy(node, self._new.__getitem__)
        for use in uses_of(node):
            if not is_within(use, self._part.bounds):
                self._new[node].replace_input_with(self._new[use.index], self._clamped(use, self._new[node]))

    def _clamped(self, use: Use, user: Node) -> Node:
        index = self._new[use.index]
        with self.graph.inserting_before(user):
            return within(use, index, self._call)

    def distance(self, use: Use, limit: Range) -> Node:
        """Write the distance of the index that is furthest from its minimum."""
        index = self._new[use.index]
        if isinstance(use, Assertion):
            index = self._call(aten.eq.Scalar, index, 0)
        index = self._call(aten.to.dtype, index, torch.int64)
        values = index
        if use.from_end and limit.limits:
            place = self._part.size(use.size)
            assert place is not None
            wrapped = self._call(aten.add.Tensor, index, self._size(*place))
            values = self._call(aten.where.self, self._call(aten.lt.Scalar, index, 0), wrapped, index)
        if not any(map(_is_symbolic, values.meta["val"].shape)):
            values = self._call(aten.reshape.default, values, [-1])  # one kernel reduces it; see `most_out_of_range`
        far = self._call(aten.sub.Tensor, values, limit.minimum)
        if limit.exempt is not None:
            exempt = self._call(aten.eq.Scalar, values, limit.exempt)
            far = self._call(aten.masked_fill.Scalar, far, exempt, 0)
        sign = self._call(aten.full.default, [], _SIGN)
        flipped = self._call(aten.amax.default, self._call(aten.bitwise_xor.Tensor, far, sign))
        return self._call(aten.bitwise_xor.Tensor, flipped, sign)

    def _size(self, node: Node, dim: int) -> Node:
        return self._call(aten.sym_size.int, self._new[node], dim)

    def _call(self, target: Callable[..., Any], *arguments: Any) -> Node:
        node = self.graph.call_function(target, arguments)
        plain = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
        assert self._mode is not None
        with self._mode, enable_python_dispatcher(), torch.no_grad():
            node.meta["val"] = target(*plain)
        return node


def within(use: Use, index: Node, call: Callable[..., Node]) -> Node:
    """Write an index that is clamped to its range; its exempt value stays.

    Args:
        use: the index; its size is a number.
        index: the node of the index.
        call: writes a call of an operator.
    """
    low = -int(use.size) if use.from_end else 0
    clamped = call(aten.clamp.default, index, low, int(use.limit) - 1)
    if use.exempt is None:
        return clamped
    return call(aten.where.self, call(aten.eq.Scalar, index, use.exempt), index, clamped)
