"""Which nodes of a graph IREE computes in one kernel, and so which values reach memory.

A model of IREE 3.13.0's dispatch formation (compiler/src/iree/compiler/DispatchCreation), made to predict bytes:

* A view of a value is that value: reshapes, slices, and transposes, which are folded into the kernel that reads them;
  but for those of `written.py`, which are kernels of their own.
* Everything that is neither a view nor elementwise is the *root* of a kernel of its own.
* An elementwise node is computed in the kernel that reads it where that is one kernel, and a root elementwise code or a
  reduction. Where a reduction and elementwise code read it, as in softmax and normalisations, it is computed in both.
* Elementwise code that reads the whole result of a contraction, convolution or reduction before anything else does is
  computed in the kernel of that, where all else that it reads is there by then; and so on with what reads its value.
* Elementwise code whose value is boolean, such as a dropout's mask, is computed in every kernel that reads it
  (`areFusableAsElementwiseOps` in FusionUtils.cpp, "to avoid i1 buffers"): what it reads is stored in its place.
* Constants are written by whoever reads them, and elementwise code of constants alone is one: it is computed once and
  for all (`--iree-opt-const-expr-hoisting`), or, as it reads nothing, by each reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node

from irongrad.passes.memory.written import VIEWS, is_written_out

aten = torch.ops.aten

CONSTANTS: frozenset[Any] = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.empty.memory_format,
        aten.full.default,
        aten.full_like.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.zeros.default,
        aten.zeros_like.default,
        torch.ops.prims.iota.default,
    }
)

REDUCTIONS: frozenset[Any] = frozenset(
    {
        aten.all.dim,
        aten.amax.default,
        aten.amin.default,
        aten.any.dim,
        aten.mean.dim,
        aten.mean.default,
        aten.prod.dim_int,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var_mean.correction,
    }
)

# Operators that change the dtype alone.
CASTS: frozenset[Any] = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def is_view(node: Node) -> bool:
    """Whether the value of `node` is the memory of its first argument, or a part of it."""
    return node.op == "call_function" and node.target in VIEWS and not is_written_out(node)


def is_constant(node: Node) -> bool:
    """Whether the value of `node` depends on nothing."""
    if node not in _CONSTANT:
        literal = node.op == "get_attr" or (node.op == "call_function" and node.target in CONSTANTS)
        _CONSTANT[node] = literal or (is_pointwise(node) and all(is_constant(source(n)) for n in node.all_input_nodes))
    return _CONSTANT[node]


# What was found. No node changes from one to the other here: copies read what their originals do.
_CONSTANT: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def is_mask(node: Node) -> bool:
    """Whether `node` is computed in every kernel that reads it, as it is boolean and elementwise code reads it."""
    value = node.meta.get("val")
    if not (is_pointwise(node) and isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.ndim):
        return False
    return all(is_view(u) or is_pointwise(u) or is_reduction(u) for u in node.users)


def sources(node: Node) -> Iterator[Node]:
    """The nodes whose memory is read where the value of `node` is."""
    found = source(node)
    if not is_mask(found):
        yield found
        return
    for argument in found.all_input_nodes:
        yield from sources(argument)


def is_pointwise(node: Node) -> bool:
    """Whether each element of the value of `node` depends on single elements of its arguments."""
    if node.op != "call_function" or is_view(node):
        return False
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return tagged or node.target in CASTS or node.target in VIEWS


def is_root(node: Node) -> bool:
    """Whether `node` is computed by a kernel of its own, with whatever is fused into that."""
    return node.op == "call_function" and not (is_view(node) or is_constant(node) or is_pointwise(node))


def source(node: Node) -> Node:
    """The node whose memory the value of `node` is."""
    while is_view(node):
        node = node.args[0]
    return node


def bytes_of(node: Node) -> int:
    """The size of the value of `node`."""
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def readers(node: Node) -> list[Node]:
    """The nodes that read the value of `node`, itself or through views or masks; the output among them, if it does."""
    found: dict[Node, None] = {}
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_view(user) or is_mask(user):
            stack.extend(user.users)
        elif not is_constant(user):  # such as full_like, which reads a shape alone
            found[user] = None
    return list(found)


@dataclass(frozen=True)
class Kernels:
    """Which kernel computes which node.

    Attributes:
        leader: by node that is neither view nor constant, a node that stands for its kernel; several where it is
            computed in more than one.
        time: by leader, the position in the graph at which its kernel runs.
        position: of every node in the graph.
    """

    leader: dict[Node, Node]
    time: dict[Node, int]
    position: dict[Node, int]

    def runs_at(self, node: Node) -> int:
        """When `node` is computed; its own position where it is no kernel's, such as the output."""
        return self.time[self.leader[node]] if node in self.leader else self.position[node]

    def is_stored(self, node: Node) -> bool:
        """Whether the value of `node` reaches memory: somebody outside its kernel reads it."""
        return any(self.leader.get(r) is not self.leader[node] for r in readers(node) if not self._recomputes(r, node))

    def _recomputes(self, reader: Node, node: Node) -> bool:
        return is_reduction(reader) and self._is_shared(node)

    def _is_shared(self, node: Node) -> bool:
        """Whether the reductions that read `node` compute it themselves."""
        return is_pointwise(node) and self.leader[node] is not node


def is_reduction(node: Node) -> bool:
    """Whether `node` reduces dimensions."""
    return node.op == "call_function" and node.target in REDUCTIONS


def kernels(graph: Graph) -> Kernels:
    """Group the nodes of `graph` into kernels."""
    nodes = list(graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    leader: dict[Node, Node] = {}
    for node in reversed(nodes):
        if is_root(node) or (is_pointwise(node) and not is_constant(node) and not is_mask(node)):
            leader[node] = node if is_root(node) else _leader_of(node, leader)
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node, head in leader.items():
        groups[head].append(node)
    for node in nodes:
        if node.op == "call_function" and is_root(node):
            _absorb(node, leader, position, groups)
    time: dict[Node, int] = {}
    for node, head in leader.items():
        time[head] = max(time.get(head, 0), position[node])
    return Kernels(leader, time, position)


def _leader_of(node: Node, leader: dict[Node, Node]) -> Node:
    """The kernel that an elementwise `node` is computed in: that of its readers, or its own."""
    reading = readers(node)
    if any(r.op == "output" for r in reading) or not reading:
        return node
    others = {leader[r] for r in reading if not is_reduction(r)}
    reductions = {leader[r] for r in reading if is_reduction(r)}
    if len(others) == 1:
        (only,) = others
        return only if is_pointwise(only) or is_reduction(only) else node
    return next(iter(reductions)) if not others and len(reductions) == 1 else node


def _absorb(root: Node, leader: dict[Node, Node], position: dict[Node, int], groups: dict[Node, list[Node]]) -> None:
    """Compute in the kernel of `root` the elementwise code that reads it, as long as it is the first that does."""
    inside = [root]
    while (head := _first_reader(inside, leader, position)) is not None:
        if not is_pointwise(head) or bytes_of(head) != bytes_of(root):
            return
        members = groups[head]
        there = {*inside, *members}
        read = {s for m in members for n in m.all_input_nodes for s in sources(n) if not is_constant(s)} - there
        if not all(position[n] < position[root] for n in read):
            return
        for node in members:
            leader[node] = root
        inside += members


def _first_reader(inside: list[Node], leader: dict[Node, Node], position: dict[Node, int]) -> Node | None:
    """The kernel that comes first of those that read a value of the nodes `inside` another."""
    reading = {leader.get(r, r) for n in inside for r in readers(n)} - {inside[0]}
    return min(reading, key=position.__getitem__, default=None)
