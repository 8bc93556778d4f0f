"""The role that IREE gives to a node: a view of memory, elementwise code, or the root of a kernel.

* A view shares the memory of its source. Views are reshapes, slices and transposes, which IREE folds into the kernel
  that reads them. Exceptions are the views of `written_views.py`, which have kernels of their own.
* Every node that is neither a view nor elementwise is the *root* of a kernel of its own.
* Elementwise code with a boolean value, such as a dropout's mask, is recomputed in every kernel that reads it. So is a
  cast to a wider dtype. IREE stores the inputs instead (`areFusableAsElementwiseOps` in FusionUtils.cpp, "to avoid i1
  buffers", and `isBitExtendOp`).
* A value that only loops read, one row at a time, is computed in the loops, one row at a time, if it is elementwise
  code or a reordering: IREE moves the slice before it (BubbleUpExtractSlices.cpp). Lookups in tables, and code that
  depends on them, are excluded (`passes/module/hoist_lookups.py`).
* Each result of a loop or a branch is a value of its own.
* Each reader of a constant writes it. Elementwise code of constants alone is a constant too: IREE computes it once and
  for all (`--iree-opt-const-expr-hoisting`), or in each reader, as it has no inputs.
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

# IREE compiles a gather of whole rows to one loop over the result, as it does elementwise code.
_GATHERS: frozenset[Any] = frozenset({aten.index_select.default})

# If a loop reads rows that these look up, or that depend on such rows, they are computed before the loop runs:
# irongrad/passes/module/hoist_lookups.py.
_LOOKUPS: frozenset[Any] = frozenset(
    {aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default}
)

# By loop operator, the index of the argument that holds the sequences. The loop reads them one row at a time.
SEQUENCES: dict[Any, int] = {torch.ops.higher_order.scan: 2, torch.ops.higher_order.map_impl: 1}

# Operators that change only the dtype.
CASTS: frozenset[Any] = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def is_view(node: Node) -> bool:
    """Whether the value of `node` shares the memory of its first argument, or a part of it."""
    viewed = node.op == "call_function" and node.target in VIEWS
    return viewed and not (is_written_out(node) or is_joined_anew(node) or is_item(node))


def is_control(node: Node) -> bool:
    """Whether `node` is a loop or a branch."""
    return isinstance(node.target, HigherOrderOperator)


def bodies_of(node: Node) -> list[Graph]:
    """The graphs that a loop or a branch runs; for a `while_loop` the condition comes first."""
    return [graph_of(n) for n in node.args if isinstance(n, Node) and n.op == "get_attr"]


def is_item(node: Node) -> bool:
    """Whether `node` is a result of a loop or a branch."""
    return node.target is operator.getitem and is_control(node.all_input_nodes[0])


def is_constant(node: Node) -> bool:
    """Whether the value of `node` depends on no argument of the graph."""
    if node not in _CONSTANT:
        literal = node.op == "get_attr" or (node.op == "call_function" and node.target in CONSTANTS)
        _CONSTANT[node] = literal or (is_pointwise(node) and all(is_constant(source(n)) for n in node.all_input_nodes))
    return _CONSTANT[node]


# Caches. A node keeps its role while graphs are rewritten, because a copy reads the same values as its original.
_CONSTANT: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()
_LOOKED_UP: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def is_cloned(node: Node) -> bool:
    """Whether every kernel that reads `node` recomputes it: a boolean, a cast to a wider dtype, or rows for loops."""
    if is_read_by_rows(node):
        return True
    value = node.meta.get("val")
    if not (isinstance(value, torch.Tensor) and value.ndim and (value.dtype is torch.bool or widens(node))):
        return False
    others = CONTRACTIONS if widens(node) else frozenset()
    fused = (is_view(u) or is_pointwise(u) or is_reduction(u) or u.target in others for u in node.users)
    return is_pointwise(node) and all(fused)


def is_read_by_rows(node: Node) -> bool:
    """Whether only loops read `node`, one row at a time, so that they compute it themselves."""
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
    """Whether each element of `node` is an input's element, or is computed from the inputs' elements in its place."""
    computed = node.target is aten.flip.default or (node.target not in VIEWS and is_pointwise(node))
    return node.op == "call_function" and (is_view(node) or computed)


def _looks_up(node: Node) -> bool:
    """Whether the elements of `node` are looked up in a table, or computed from such elements."""
    if node not in _LOOKED_UP:
        computed_of_some = _is_by_elements(node) and any(map(_looks_up, node.all_input_nodes))
        _LOOKED_UP[node] = node.target in _LOOKUPS or computed_of_some
    return _LOOKED_UP[node]


def _reads_whole_rows(loop: Node, node: Node) -> bool:
    """Whether a loop reads `node` only as a sequence, and does not slice its rows."""
    place = SEQUENCES[loop.target]
    if any(node in _leaves(argument) for i, argument in enumerate(loop.args) if i != place):
        return False
    (body,) = bodies_of(loop)
    rows = body.find_nodes(op="placeholder")[len(_leaves(loop.args[1])) if place == 2 else 0 :]
    read = [row for argument, row in zip(_leaves(loop.args[place]), rows, strict=False) if argument is node]
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
    """The nodes whose memory is read when the value of `node` is read."""
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
    """The arguments from which `node` is computed; for a reshaped concatenation that IREE rebuilds, its parts."""
    whole = joined(node) if is_joined_anew(node) else node
    return list(whole.all_input_nodes)


def is_pointwise(node: Node) -> bool:
    """Whether each element of the value of `node` depends on a single element of each argument."""
    if node.op != "call_function":
        return False
    if node.target in VIEWS:
        return is_written_out(node)
    if is_rotation(node):
        return True
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return tagged or node.target in CASTS or node.target in _GATHERS


def is_root(node: Node) -> bool:
    """Whether `node` has a kernel of its own, into which other nodes may be fused."""
    return node.op == "call_function" and not (is_view(node) or is_constant(node) or is_pointwise(node))


def source(node: Node) -> Node:
    """The node whose memory holds the value of `node`."""
    while is_view(node):
        node = node.args[0]
    return node


def bytes_of(node: Node) -> int:
    """The size of the value of `node` in bytes; the sum if it has several values."""
    return bytes_in(node.meta.get("val"))


def bytes_in(value: object) -> int:
    """The size of a value in bytes; the sum over its tensors."""
    return sum(v.numel() * v.element_size() for v in tensors_in(value))


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of which a value consists."""
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def shape_of(node: Node) -> torch.Size:
    """The shape of the value of `node`; of the first value if it has several."""
    return next((v.shape for v in tensors_in(node.meta.get("val"))), torch.Size())


def dimensions_of(node: Node) -> int:
    """The number of dimensions of the value of `node` that have more than one element."""
    return sum(size != 1 for size in shape_of(node))


def readers(node: Node) -> list[Node]:
    """The nodes that read the value of `node`, directly or through views and recomputed code; also the output node."""
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
        elif not is_constant(user):  # a constant such as full_like reads only the shape
            found[user] = None
            found |= dict.fromkeys(forms_of(user))
    return list(found)


def is_reduction(node: Node) -> bool:
    """Whether `node` reduces dimensions."""
    return node.op == "call_function" and node.target in REDUCTIONS
