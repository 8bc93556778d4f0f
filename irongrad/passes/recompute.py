"""Recompute forward values in the backward, so that IREE neither merges nor hoists the copies.

IREE's common subexpression elimination would merge a copy with its original, and its scheduler may compute the copy
early. So the operands of a copy are *tied* to a value that the backward has just computed:

    tied = where(abs(late[0]) < 0, 0, value)

The condition is false for every `late`, NaN included, so `tied` equals `value` bit for bit. MLIR does not know that, so
the copy differs from its original and runs after `late`. LLVM does know it, and removes the condition from the kernel.

IREE 3.13.0's own `util.optimization_barrier` does not help. It ends a command buffer, and IREE frees all values that
are in memory there only when the last of them is dead.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
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
from irongrad.sizes.symbols import has_symbols

aten = torch.ops.aten

# The key of a copy: its original, and the value that its operands are tied to; None if one copy serves all readers.
_Key: TypeAlias = tuple[Node, Node | None]

# The metadata key of a copy for the name of its original, and that of the pass that made it.
_RECOMPUTED, _BY = "irongrad_recomputed", "irongrad_recomputed_by"


def is_backward(node: Node) -> bool:
    """Whether autograd's backward computes `node`."""
    return node.op == "call_function" and bool(node.meta.get("autograd_backward"))


def is_recomputed(node: Node, by: str | None = None) -> bool:
    """Whether `node` is a copy that `recompute` made, for the pass `by` if that is given."""
    return _RECOMPUTED in node.meta and by in (None, node.meta[_BY])


def original_names(graph: Graph) -> set[str]:
    """Return the names of the values that the backward of `graph` recomputes."""
    return {n.meta[_RECOMPUTED] for n in graph.nodes if is_recomputed(n)}


def is_forward(node: Node) -> bool:
    """Whether `node` computes something outside the backward."""
    return node.op == "call_function" and not is_backward(node)


def recompute(graph: Graph, saved: Set[Node], *, packed: bool = True, by: str = "") -> dict[Node, Node]:
    """Make the backward of `graph` keep only the forward values `saved`, and recompute the others where it reads them.

    Elementwise code is recomputed in every kernel that reads it, so its values are never stored. Everything else is
    recomputed once, at its first reader.

    Args:
        graph: the graph, rewritten in place.
        saved: the forward values that the backward may keep.
        packed: whether operands of contractions are packed, as in `usage`.
        by: the name of the pass, which `is_recomputed` can ask for.

    Returns:
        For each copy its original, without views.
    """
    work = _Recomputation(graph, saved, packed, by)
    for node in list(graph.nodes):
        if is_backward(node):
            work.rewire(node)
        work.note_computed(node)
    return {copy: original for copy, original in work.copies.items() if not is_view(copy)}


@dataclass
class _Recomputation:
    graph: Graph
    saved: Set[Node]
    packed: bool
    by: str
    copies: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The model of kernels compares sizes, so it takes no graph of any size.
        any_size = any(has_symbols(n.meta.get("val")) for n in self.graph.nodes)
        self._grouping = None if any_size else kernels(self.graph, packed=self.packed)
        self._late: Node | None = None
        self._copy_of: dict[_Key, Node] = {}
        self._stage: dict[Node, Node] = {}
        self._tied: dict[tuple[Node, Node], Node] = {}

    def note_computed(self, node: Node) -> None:
        """Record that `node` is computed from here on, so that operands can be tied to it.

        A half-precision value is only used if there is no wider one, and a value whose size varies is not used.
        """
        found = self._grouping
        stored = is_root(node) if found is None else node in found.leader and found.is_stored(node)
        serves = stored and _is_float(node) and not is_cast(node)
        if serves and (_is_wide(node) or self._late is None or not _is_wide(self._late)):
            self._late = node

    def rewire(self, node: Node) -> None:
        """Make a node of the backward read copies."""
        with self.graph.inserting_before(node):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self._replacement)

    def _is_leaf(self, node: Node) -> bool:
        return not is_forward(node) or node in self.saved or is_constant(node)

    def _replacement(self, node: Node) -> Node:
        """The value that the backward reads instead of `node`."""
        if self._is_leaf(source(node)):
            return node
        for needed in self._copy_order(node):  # a loop, because recursion overflows Python's stack in deep networks
            self._copy(needed)
        return self._copy(node)

    def _copy_order(self, node: Node) -> Iterator[Node]:
        """The nodes to copy for a copy of `node`, in topological order, `node` last."""
        seen = {node}
        stack = [(node, iter(self._operands_to_copy(node)))]
        while stack:
            current, operands = stack[-1]
            operand = next((n for n in operands if n not in seen), None)
            if operand is None:
                yield current
                stack.pop()
            else:
                seen.add(operand)
                stack.append((operand, iter(self._operands_to_copy(operand))))

    def _operands_to_copy(self, node: Node) -> list[Node]:
        """The operands of `node` that have to be copied with it; none if `node` has a copy already."""
        if self._key(node) in self._copy_of:
            return []
        return [n for n in node.all_input_nodes if not (self._reads_original(node, n) or self._is_leaf(source(n)))]

    def _key(self, node: Node) -> _Key:
        """The key of a copy: one copy of a root, or of an item of several results, serves all readers."""
        everywhere = node.target is operator.getitem or is_root(node)
        return node, None if everywhere else self._late

    def _copy(self, node: Node) -> Node:
        assert self._late is not None
        if node.target is operator.getitem:  # its operator has several results, and is copied once for all of them
            return self._copy_item(node)
        key = self._key(node)
        if key not in self._copy_of:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._operand_of_copy(node, n))
            self._stage[self._add_copy(node, key, args, kwargs)] = self._late
        return self._copy_of[key]

    def _copy_item(self, node: Node) -> Node:
        key = self._key(node)
        if key not in self._copy_of:
            whole, place = node.args
            assert isinstance(whole, Node)
            whole_copy = self._copy(whole)
            self._stage[self._add_copy(node, key, (whole_copy, place), {})] = self._stage[whole_copy]
        return self._copy_of[key]

    def _add_copy(self, node: Node, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Add a copy of `node` under `key`."""
        copy = self._copy_of[key] = self.graph.call_function(node.target, args, kwargs)
        copy.meta = {**node.meta, "autograd_backward": True, _RECOMPUTED: node.name, _BY: self.by}
        self.copies[copy] = node
        return copy

    def _is_free(self, node: Node) -> bool:
        """Whether `node` takes no memory of its own: an argument, a constant, or a view of one."""
        return source(node).op == "placeholder" or is_constant(source(node))

    def _reads_original(self, node: Node, operand: Node) -> bool:
        """Whether a copy of `node` reads the original `operand`."""
        distinct = not all(map(self._is_free, node.all_input_nodes))
        # IREE would keep the packed operand of a contraction in memory for the contraction's copy.
        keep_free = distinct and node.target not in CONTRACTIONS
        return is_constant(source(operand)) or (keep_free and self._is_free(operand))

    def _operand_of_copy(self, node: Node, operand: Node) -> Node:
        """The value that a copy of `node` reads instead of `operand`."""
        if self._reads_original(node, operand):
            return operand
        # The view is tied, not the value that it views: IREE may have stored the value in the view's layout only.
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
            self._tied[late, late] = never(self.graph, [late])
        return self._tied[late, late]


def never(graph: Graph, late: Sequence[Node], *, backward: bool = True) -> Node:
    """Return a condition that is always false, and that is not known before all of `late` are computed.

    Args:
        graph: the graph, which has an insertion point.
        late: floating-point values that are not empty.
        backward: whether the new nodes belong to the backward.
    """

    def one(value: Node) -> Node:
        flat = added(graph, aten.view.default, value, [-1], like=value, backward=backward)
        first = added(graph, aten.slice.Tensor, flat, 0, 0, 1, like=value, backward=backward)
        scalar = added(graph, aten.view.default, first, [], like=value, backward=backward)
        size = added(graph, aten.abs.default, scalar, like=value, backward=backward)
        return added(graph, aten.lt.Scalar, size, 0, like=value, backward=backward)

    first, *others = map(one, late)
    for other in others:
        first = added(graph, aten.bitwise_or.Tensor, first, other, like=other, backward=backward)
    return first


def tie(graph: Graph, node: Node, condition: Node, *, backward: bool = True) -> Node:
    """Return the value of `node` as a node that depends on `condition`, which is always false.

    Args:
        graph: the graph, which has an insertion point.
        node: the node.
        condition: the condition, as of `never`.
        backward: whether the new nodes belong to the backward.
    """
    options = {"dtype": node.meta["val"].dtype, "device": torch.device("cpu"), "pin_memory": False}
    zero = added(graph, aten.full.default, [], 0, like=node, backward=backward, **options)
    tied = graph.call_function(aten.where.self, (condition, zero, node))
    tied.meta = {**node.meta, "autograd_backward": True} if backward else {**node.meta}
    return tied


def added(graph: Graph, operator: OpOverload, *args: Any, like: Node, backward: bool, **kwargs: Any) -> Node:
    """Add a call of `operator` at the insertion point, as `graph.nodes.call`; `backward` puts it into the backward."""
    node = call(graph, operator, *args, like=like, **kwargs)
    if backward:
        node.meta["autograd_backward"] = True
    return node


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and not has_symbols(value) and value.numel() > 0


def is_cast(node: Node) -> bool:
    """Whether `node` only changes the dtype.

    IREE 3.13.0 recomputes a cast to a wider dtype in each kernel that reads it: the whole cast, even to read one
    element. It then spends minutes on compiling that kernel (tests/passes/graph/test_rematerialise.py).
    """
    return node.target in CASTS


def _is_wide(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.float32, torch.float64)
