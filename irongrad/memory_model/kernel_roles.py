"""What IREE makes of a node: a view of memory, elementwise code, or the root of a kernel.

* A view of a value is that value: reshapes, slices, and transposes, which are folded into the kernel that reads them;
  but for those of `written.py`, which are kernels of their own.
* Everything that is neither a view nor elementwise is the *root* of a kernel of its own.
* Elementwise code whose value is boolean, such as a dropout's mask, and a cast to a wider dtype, is computed in every
  kernel that reads it (`areFusableAsElementwiseOps` in FusionUtils.cpp, "to avoid i1 buffers", and `isBitExtendOp`):
  what it reads is stored in its place.
* What loops alone read, and a row at a time, is computed there, a row at a time, if it is elementwise code, a gather or
  in another order: IREE moves the slice before it (BubbleUpExtractSlices.cpp).
* Each result of a loop or a branch is a value of its own.
* Constants are written by whoever reads them, and elementwise code of constants alone is one: it is computed once and
  for all (`--iree-opt-const-expr-hoisting`), or, as it reads nothing, by each reader.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from irongrad.graph.nodes import graph_of
from irongrad.memory_model.written_views import (
    CONTRACTIONS,
    CUTS,
    VIEWS,
    forms_of,
    is_joined_anew,
    is_rotation,
    is_written_out,
    joined,
)

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

# A gather of whole rows is one loop over the result for IREE, as elementwise code is.
_GATHERS: frozenset[Any] = frozenset({aten.index_select.default})

# What loops read that look rows up, or compute with those, is computed before they run:
# irongrad/passes/module/hoist_lookups.py.
_LOOKUPS: frozenset[Any] = frozenset(
    {aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default}
)

# By loop, which of its arguments are the sequences that it reads a row at a time.
SEQUENCES: dict[Any, int] = {torch.ops.higher_order.scan: 2, torch.ops.higher_order.map_impl: 1}

# Operators that change the dtype alone.
CASTS: frozenset[Any] = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def is_view(node: Node) -> bool:
    """Whether the value of `node` is the memory of its first argument, or a part of it."""
    viewed = node.op == "call_function" and node.target in VIEWS
    return viewed and not (is_written_out(node) or is_joined_anew(node) or is_item(node))


def is_control(node: Node) -> bool:
    """Whether `node` is a loop or a branch."""
    return isinstance(node.target, HigherOrderOperator)


def bodies_of(node: Node) -> list[Graph]:
    """The graphs that a loop or a branch runs; of a `while_loop` the condition first."""
    return [graph_of(n) for n in node.args if isinstance(n, Node) and n.op == "get_attr"]


def is_item(node: Node) -> bool:
    """Whether `node` is a result of a loop or a branch."""
    return node.target is operator.getitem and is_control(node.all_input_nodes[0])


def is_constant(node: Node) -> bool:
    """Whether the value of `node` depends on nothing."""
    if node not in _CONSTANT:
        literal = node.op == "get_attr" or (node.op == "call_function" and node.target in CONSTANTS)
        _CONSTANT[node] = literal or (is_pointwise(node) and all(is_constant(source(n)) for n in node.all_input_nodes))
    return _CONSTANT[node]


# What was found. No node changes from one to the other here: copies read what their originals do.
_CONSTANT: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()
_LOOKED_UP: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def is_cloned(node: Node) -> bool:
    """Whether `node` is computed in every kernel that reads it: a boolean in elementwise code, or a wider cast."""
    if is_read_by_rows(node):
        return True
    value = node.meta.get("val")
    if not (isinstance(value, torch.Tensor) and value.ndim and (value.dtype is torch.bool or widens(node))):
        return False
    others = CONTRACTIONS if widens(node) else frozenset()
    fused = (is_view(u) or is_pointwise(u) or is_reduction(u) or u.target in others for u in node.users)
    return is_pointwise(node) and all(fused)


def is_read_by_rows(node: Node) -> bool:
    """Whether `node` is computed in the loops that read it, and nothing else does: a row at a time."""
    if not any(node.graph.find_nodes(op="call_function", target=loop, sort=False) for loop in SEQUENCES):
        return False
    seen, stack = {node}, [node]
    while stack:
        value = stack.pop()
        users = [u for u in value.users if is_view(u) or not is_constant(u)]
        if not users or not _is_by_elements(value) or _looks_up(value):
            return False
        others = [u for u in users if u.target not in SEQUENCES]
        if not all(_reads_whole_rows(loop, value) for loop in users if loop.target in SEQUENCES):
            return False
        stack += [u for u in others if u not in seen]
        seen.update(others)
    return True


def _is_by_elements(node: Node) -> bool:
    """Whether each element of `node` is one that it reads, or computed of those in its place."""
    computed = node.target is aten.flip.default or (node.target not in VIEWS and is_pointwise(node))
    return node.op == "call_function" and (is_view(node) or computed)


def _looks_up(node: Node) -> bool:
    """Whether the elements of `node` are looked up, or computed of some that are."""
    if node not in _LOOKED_UP:
        computed_of_some = _is_by_elements(node) and any(map(_looks_up, node.all_input_nodes))
        _LOOKED_UP[node] = node.target in _LOOKUPS or computed_of_some
    return _LOOKED_UP[node]


def _reads_whole_rows(loop: Node, node: Node) -> bool:
    """Whether a loop reads `node` as one of its sequences, and no slices of its rows."""
    place = SEQUENCES[loop.target]
    if any(node in _leaves(given) for i, given in enumerate(loop.args) if i != place):
        return False
    (body,) = bodies_of(loop)
    rows = body.find_nodes(op="placeholder")[len(_leaves(loop.args[1])) if place == 2 else 0 :]
    read = [row for given, row in zip(_leaves(loop.args[place]), rows, strict=False) if given is node]
    return not any(u.target in CUTS or u.target is aten.split_with_sizes.default for row in read for u in row.users)


def _leaves(argument: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(argument))


def widens(node: Node) -> bool:
    """Whether `node` is a cast to a wider dtype."""
    if node.target not in CASTS:
        return False
    before, after = (n.meta["val"].dtype for n in (node.all_input_nodes[0], node))
    return bool(after.itemsize > before.itemsize)


def sources(node: Node) -> Iterator[Node]:
    """The nodes whose memory is read where the value of `node` is."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        found = source(stack.pop())
        if found not in seen:
            seen.add(found)
            if is_cloned(found):
                stack += reversed(found.all_input_nodes)
            else:
                yield found


def inputs_of(node: Node) -> list[Node]:
    """The arguments that `node` is computed from: the parts, where it is a concatenation made anew."""
    whole = joined(node) if is_joined_anew(node) else node
    return list(whole.all_input_nodes)


def is_pointwise(node: Node) -> bool:
    """Whether each element of the value of `node` depends on single elements of its arguments."""
    if node.op != "call_function":
        return False
    if node.target in VIEWS:
        return is_written_out(node)
    if is_rotation(node):
        return True
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return tagged or node.target in CASTS or node.target in _GATHERS


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


def shape_of(node: Node) -> torch.Size:
    """The shape of the value of `node`, or of the first of several."""
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return next((v.shape for v in values if isinstance(v, torch.Tensor)), torch.Size())


def readers(node: Node) -> list[Node]:
    """The nodes that read the value of `node`, itself or through views or masks; the output among them, if it does."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [u for u in node.users if not is_joined_anew(u)]
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if is_view(user) or is_cloned(user):
            stack.extend(u for u in user.users if not is_joined_anew(u))
        elif not is_constant(user):  # such as full_like, which reads a shape alone
            found[user] = None
            found |= dict.fromkeys(forms_of(user))
    return list(found)


def is_reduction(node: Node) -> bool:
    """Whether `node` reduces dimensions."""
    return node.op == "call_function" and node.target in REDUCTIONS
