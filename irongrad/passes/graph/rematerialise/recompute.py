"""Computing forward values again in the backward, so that IREE neither merges nor hoists the copies.

IREE's common subexpression elimination would merge a copy with its original, and its scheduler may compute it early.
So what a copy reads is *tied* to a value of the backward that has just been computed:

    tied = where(abs(late[0]) < 0, 0, value)

The condition is false whatever `late` holds, NaN included, so that the tied value is the value, bit for bit. MLIR does
not know that, so the copy differs from its original and comes after `late`; LLVM does, and the kernel has no trace of
it.

IREE 3.13.0's own `util.optimization_barrier` does not serve: it ends a command buffer, and everything that is in memory
there is then freed only when the last of it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import call
from irongrad.memory_model.fusion import kernels
from irongrad.memory_model.kernel_roles import CASTS, is_constant, is_root, is_view, source
from irongrad.memory_model.written_views import CONTRACTIONS

aten = torch.ops.aten

# Of a copy: what it is a copy of, and the value that what it reads is tied to, where it is not made once and for all.
_Key: TypeAlias = tuple[Node, Node | None]

# Of a copy: the name of its original.
_RECOMPUTED = "irongrad_recomputed"


def is_backward(node: Node) -> bool:
    """Whether autograd's backward computes `node`."""
    return node.op == "call_function" and bool(node.meta.get("autograd_backward"))


def is_recomputed(node: Node) -> bool:
    """Whether `node` is a copy that `recompute` made."""
    return _RECOMPUTED in node.meta


def original_names(graph: Graph) -> set[str]:
    """The names of the values that the backward of `graph` computes again."""
    return {n.meta[_RECOMPUTED] for n in graph.nodes if is_recomputed(n)}


def is_forward(node: Node) -> bool:
    """Whether `node` computes something, and not in the backward."""
    return node.op == "call_function" and not is_backward(node)


def recompute(graph: Graph, saved: Set[Node], *, packed: bool = True) -> dict[Node, Node]:
    """Have the backward of `graph` keep only `saved` of the forward, and compute others again where it reads them.

    Elementwise code is computed again for every kernel that reads it, in that kernel, and so never stored; everything
    else once, at its first reader.

    Args:
        graph: the graph.
        saved: what the backward may keep.
        packed: as `usage` takes it.

    Returns:
        The originals by copy, without views.
    """
    work = _Recomputation(graph, saved, packed)
    for node in list(graph.nodes):
        if is_backward(node):
            work.rewire(node)
        work.passed(node)
    return {copy: original for copy, original in work.copies.items() if not is_view(copy)}


@dataclass
class _Recomputation:
    graph: Graph
    saved: Set[Node]
    packed: bool
    copies: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grouping = kernels(self.graph, packed=self.packed)
        self._late: Node | None = None
        self._made: dict[_Key, Node] = {}
        self._stage: dict[Node, Node] = {}
        self._tied: dict[tuple[Node, Node], Node] = {}

    def passed(self, node: Node) -> None:
        """Take note that `node` is computed from here on; one of half precision serves where there is no other."""
        stored = node in self._grouping.leader and self._grouping.is_stored(node)
        serves = stored and _is_float(node) and not is_cast(node)
        if serves and (_is_wide(node) or self._late is None or not _is_wide(self._late)):
            self._late = node

    def rewire(self, node: Node) -> None:
        """Have a node of the backward read copies."""
        with self.graph.inserting_before(node):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self._value)

    def _is_leaf(self, node: Node) -> bool:
        return not is_forward(node) or node in self.saved or is_constant(node)

    def _value(self, node: Node) -> Node:
        """What the backward reads in place of `node`."""
        if self._is_leaf(source(node)):
            return node
        for needed in self._needed(node):  # one by one, as Python's stack is not as deep as networks are
            self._copy(needed)
        return self._copy(node)

    def _needed(self, node: Node) -> Iterator[Node]:
        """The nodes that a copy of `node` needs copies of, itself included, each after those that it needs."""
        seen = {node}
        stack = [(node, iter(self._copied(node)))]
        while stack:
            current, operands = stack[-1]
            operand = next((n for n in operands if n not in seen), None)
            if operand is None:
                yield current
                stack.pop()
            else:
                seen.add(operand)
                stack.append((operand, iter(self._copied(operand))))

    def _copied(self, node: Node) -> list[Node]:
        """The operands of which a copy of `node`, where there is none yet, reads copies."""
        if self._key(node) in self._made:
            return []
        return [n for n in node.all_input_nodes if not (self._stays(node, n) or self._is_leaf(source(n)))]

    def _key(self, node: Node) -> _Key:
        """A copy of several results, and of a root, serves everywhere."""
        everywhere = node.target is operator.getitem or is_root(node)
        return node, None if everywhere else self._late

    def _copy(self, node: Node) -> Node:
        assert self._late is not None
        if node.target is operator.getitem:  # of several results: a copy of all of them, which is made once
            return self._item(node)
        key = self._key(node)
        if key not in self._made:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._operand(node, n))
            self._stage[self._add(node, key, args, kwargs)] = self._late
        return self._made[key]

    def _item(self, node: Node) -> Node:
        key = self._key(node)
        if key not in self._made:
            whole, place = node.args
            assert isinstance(whole, Node)
            made = self._copy(whole)
            self._stage[self._add(node, key, (made, place), {})] = self._stage[made]
        return self._made[key]

    def _add(self, node: Node, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """A copy of `node`, known as `key`."""
        copy = self._made[key] = self.graph.call_function(node.target, args, kwargs)
        copy.meta = {**node.meta, "autograd_backward": True, _RECOMPUTED: node.name}
        self.copies[copy] = node
        return copy

    def _is_free(self, node: Node) -> bool:
        """Whether `node` takes no memory of its own: an argument, a constant, or a view of one."""
        return source(node).op == "placeholder" or is_constant(source(node))

    def _stays(self, node: Node, operand: Node) -> bool:
        """Whether a copy of `node` reads `operand` as it does."""
        distinct = not all(map(self._is_free, node.all_input_nodes))
        # What IREE packs for a contraction it would keep for its copy.
        keep_free = distinct and node.target not in CONTRACTIONS
        return is_constant(source(operand)) or (keep_free and self._is_free(operand))

    def _operand(self, node: Node, operand: Node) -> Node:
        """What a copy of `node` reads in place of `operand`."""
        if self._stays(node, operand):
            return operand
        # A view of a kept value is tied, and not the value: IREE may have that in the view's layout only.
        if self._is_leaf(source(operand)):
            return self._tie(operand)
        copy = self._copy(operand)
        return copy if self._stage[copy] is self._late else self._tie(copy)

    def _tie(self, node: Node) -> Node:
        late = self._late
        assert late is not None
        if (node, late) not in self._tied:
            self._tied[node, late] = tie(self.graph, node, self._condition(late))
        return self._tied[node, late]

    def _condition(self, late: Node) -> Node:
        if (late, late) not in self._tied:
            flat = _backward_call(self.graph, aten.view.default, late, [-1], like=late)
            first = _backward_call(self.graph, aten.slice.Tensor, flat, 0, 0, 1, like=late)
            scalar = _backward_call(self.graph, aten.view.default, first, [], like=late)
            size = _backward_call(self.graph, aten.abs.default, scalar, like=late)
            self._tied[late, late] = _backward_call(self.graph, aten.lt.Scalar, size, 0, like=late)
        return self._tied[late, late]


def tie(graph: Graph, node: Node, condition: Node) -> Node:
    """The value of `node`, after `condition`, which is false."""
    kind = {"dtype": node.meta["val"].dtype, "device": torch.device("cpu"), "pin_memory": False}
    zero = _backward_call(graph, aten.full.default, [], 0, like=node, **kind)
    tied = graph.call_function(aten.where.self, (condition, zero, node))
    tied.meta = {**node.meta, "autograd_backward": True}
    return tied


def _backward_call(graph: Graph, operator: OpOverload, *args: Any, like: Node, **kwargs: Any) -> Node:
    node = call(graph, operator, *args, like=like, **kwargs)
    node.meta["autograd_backward"] = True
    return node


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def is_cast(node: Node) -> bool:
    """Whether `node` only changes the dtype.

    IREE 3.13.0 computes a cast to a wider dtype again in each kernel that reads it, all of it where one element is
    read, and spends minutes on that kernel (tests/passes/graph/test_rematerialise.py).
    """
    return node.target in CASTS


def _is_wide(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.float32, torch.float64)
