"""Layout propagation: sink transposes through operators that do not depend on the order of dimensions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, replace, value_of
from irongrad.memory_model.product_tiles import has_windows, slides, stretch_of
from irongrad.passes.base import Context, PassResult
from irongrad.targets import Ability

aten = torch.ops.aten

Order: TypeAlias = tuple[int, ...]  # dimension d of a transposed tensor is dimension order[d] of its source
_CHANNELS_LAST: Order = (0, 3, 1, 2)  # of a source that is channels-last

# In the `meta` of a convolution that this pass has seen to be written channels-last.
_WRITTEN_LAST = "written_channels_last"

Rule: TypeAlias = Callable[[Node], "tuple[Node, Order] | None"]


@dataclass(frozen=True)
class Layout:
    """Sink transposes towards the outputs, where they meet their inverses and cancel.

    Before:
        a = permute(x, [0, 3, 1, 2]); b = relu(a + bias); c = permute(b, [0, 2, 3, 1]); return (c,)
    After:
        b = relu(x + permute(bias, [0, 2, 3, 1])); return (b,)

    The matrix products that replace convolutions are channels-last between two transposes. After this pass, a network
    of convolutions is channels-last from its first convolution to its loss, and back.

    A transpose sinks through elementwise functions, reductions, slices, pads, flips and concatenations. It also sinks
    through views that split or merge only dimensions which are adjacent before the transpose. If an elementwise
    function reads several layouts, most of its large operands must agree on one. For channels-last images, half of them
    is enough. A transpose stops at everything else, and at an output.
    """

    name: ClassVar[str] = "layout"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        sunk = 0
        for node in list(graph.graph.nodes):
            if node.target is aten.convolution.default and not _has_kernel(node, context):
                continue
            sunk += node.op == "call_function" and _sink(node)
        return PassResult(sunk > 0, {"sunk": sunk})


def _sink(node: Node) -> bool:
    """Move `node` before the transposes of its operands."""
    rule = _RULES.get(node.target) or (_elementwise if _is_elementwise(node.target) else None)
    if rule is None or not node.users or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    with node.graph.inserting_before(node):
        done = rule(node)
        if done is None:
            return False
        new, order = done
        if order != tuple(range(len(order))):
            new = call(node.graph, aten.permute.default, new, list(order), like=node)
    replace(node, new)
    return True


def _has_kernel(node: Node, context: Context) -> bool:
    """Whether a convolution has a kernel of ours, which writes the result channels-last."""
    groups = node.args[-1]
    outer, inner, *kernel = value_of(node.args[1]).shape
    images, _, *out = value_of(node).shape
    if Ability.CONVOLUTIONS not in context.abilities or len(kernel) != 2:
        return False
    if 1 < groups == outer:
        return True
    sizes = {"b": groups, "r": images * math.prod(out), "c": outer // groups, "k": inner * math.prod(kernel)}
    stretch = stretch_of(inner, kernel[-1], node.args[5][-1], groups)
    return slides(kernel, out) and has_windows(sizes, stretch)


def _transposed(value: Any) -> tuple[Node, Order] | None:
    """The source and the order of a transpose."""
    if not isinstance(value, Node) or value.target is not aten.permute.default:
        return None
    source = value.all_input_nodes[0]
    order = value.args[1]
    assert isinstance(order, (list, tuple))
    of_source = tuple(int(d) % len(order) for d in order)
    if _WRITTEN_LAST in source.meta and of_source == _inverse(_CHANNELS_LAST):
        return None  # nothing moves: a kernel writes the result in this order
    return source, of_source


def _inverse(order: Order) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _permute(node: Node) -> tuple[Node, Order] | None:
    """Compose two transposes into one."""
    outer = _transposed(node)
    inner = _transposed(outer[0]) if outer else None
    if outer is None:
        return None
    if inner is None:
        return (outer[0], outer[1]) if outer[1] == tuple(range(len(outer[1]))) else None
    return inner[0], tuple(inner[1][d] for d in outer[1])


def _is_elementwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target is aten.alias.default)


def _elementwise(node: Node) -> tuple[Node, Order] | None:
    shape = value_of(node).shape
    operands = [a for a in node.args if isinstance(a, Node)]
    large = [a for a in operands if value_of(a).shape == shape and not _is_cheap(a)]
    orders = Counter(t[1] for a in large if (t := _transposed(a)) is not None)
    if not orders:
        return None
    ((order, votes),) = orders.most_common(1)
    enough = 2 * votes >= len(large) if order == _CHANNELS_LAST else 2 * votes > len(large)
    if not enough or any(isinstance(a, (list, tuple)) for a in node.args):
        return None
    args = [_untransposed(a, order, node) if isinstance(a, Node) else a for a in node.args]
    return call(node.graph, _target(node), *args, like=node, **node.kwargs), order


def _target(node: Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target


_FILLS = frozenset({aten.full.default, aten.full_like.default, aten.zeros.default, aten.ones.default})


def _is_cheap(node: Node) -> bool:
    """Whether `node` costs the same in another order of dimensions."""
    return node.target in _FILLS or node.target is aten.expand.default


def _untransposed(operand: Node, order: Order, like: Node) -> Node:
    """`operand`, broadcast to the rank of `order`, as it is before a transpose in that order."""
    transposed = _transposed(operand)
    if transposed is not None and transposed[1] == order:
        return transposed[0]
    graph, shape = operand.graph, list(value_of(operand).shape)
    if not shape:
        return operand
    wide = [1] * (len(order) - len(shape)) + shape
    inverse = _inverse(order)
    if operand.target is aten.expand.default:
        source = _untransposed(operand.all_input_nodes[0], order, like)
        return call(graph, aten.expand.default, source, [wide[d] for d in inverse], like=like)
    if sum(size != 1 for size in wide) <= 1:
        return call(graph, aten.view.default, operand, [wide[d] for d in inverse], like=like)
    if len(wide) > len(shape):
        operand = call(graph, aten.view.default, operand, wide, like=like)
    return call(graph, aten.permute.default, operand, list(inverse), like=like)


def _reduction(node: Node) -> tuple[Node, Order] | None:
    """A reduction over the dimensions `args[1]`; the next argument is `keepdim`."""
    transposed = _transposed(node.args[0])
    if transposed is None or len(node.args) < 2 or not node.args[1]:
        return None
    source, order = transposed
    dims, *rest = node.args[1:]
    assert isinstance(dims, (list, tuple))
    reduced = [order[int(d)] for d in dims]
    new = call(node.graph, _target(node), source, reduced, *rest, like=node, **node.kwargs)
    if rest and rest[0]:
        return new, order
    left = sorted(set(order) - set(reduced))
    return new, tuple(left.index(d) for d in order if d not in reduced)


def _view(node: Node) -> tuple[Node, Order] | None:
    """A view that splits and merges runs of dimensions, if each is a run in the source too."""
    transposed = _transposed(node.args[0])
    if transposed is None:
        return None
    source, order = transposed
    runs = _runs(list(value_of(node.all_input_nodes[0]).shape), list(value_of(node).shape))
    if runs is None:
        return None
    starts: list[tuple[int, int]] = []
    for number, (dims, _) in enumerate(runs):
        places = [order[d] for d in dims]
        if places != list(range(places[0], places[0] + len(places))):
            return None
        starts.append((places[0], number))
    shape: list[int] = []
    first: dict[int, int] = {}
    for _, number in sorted(starts):
        first[number] = len(shape)
        shape += runs[number][1]
    new = call(node.graph, aten.view.default, source, shape, like=node)
    return new, tuple(first[n] + k for n, (_, sizes) in enumerate(runs) for k in range(len(sizes)))


def _runs(before: list[int], after: list[int]) -> list[tuple[list[int], list[int]]] | None:
    """The shortest runs of dimensions of `before`, each with the sizes that it becomes in `after`."""
    if 0 in before:
        return None
    runs: list[tuple[list[int], list[int]]] = []
    position, rest = 0, list(after)
    while position < len(before):
        dims, sizes = [position], [rest.pop(0)] if rest else []
        position += 1
        while (have := math.prod(before[d] for d in dims)) != math.prod(sizes):
            if have < math.prod(sizes):
                dims.append(position)
                position += 1
            else:
                sizes.append(rest.pop(0))
        runs.append((dims, sizes))
    if runs:
        runs[-1][1].extend(rest)  # trailing sizes of one
    return runs


def _slice(node: Node) -> tuple[Node, Order] | None:
    transposed = _transposed(node.args[0])
    if transposed is None:
        return None
    source, order = transposed
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(dim, int)
    if dim % len(order) == 0 and order[0] != 0:
        # Rows are contiguous only after the transpose, so that readers such as the steps of a sequence share a kernel.
        return None
    return call(node.graph, aten.slice.Tensor, source, order[dim], *node.args[2:], like=node), order


def _pad(node: Node) -> tuple[Node, Order] | None:
    transposed = _transposed(node.args[0])
    if transposed is None:
        return None
    source, order = transposed
    padding = node.args[1]
    assert isinstance(padding, (list, tuple))
    pairs = [tuple(padding[i : i + 2]) for i in range(0, len(padding), 2)][::-1]
    of_dim = dict(zip(order[len(order) - len(pairs) :], pairs, strict=True))
    first = min((d for d, pair in of_dim.items() if any(pair)), default=0)  # canonical: equal pads are equal nodes
    pads = [p for d in reversed(range(first, len(order))) for p in of_dim.get(d, (0, 0))]
    return call(node.graph, aten.constant_pad_nd.default, source, pads, *node.args[2:], like=node), order


def _flip(node: Node) -> tuple[Node, Order] | None:
    transposed = _transposed(node.args[0])
    dims = node.args[1]
    if transposed is None:
        return None
    assert isinstance(dims, (list, tuple))
    source, order = transposed
    if list(dims) == [0] and order[0] != 0:
        return None  # a loop reads the rows from the last one on, and they are contiguous only after the transpose
    turned = [order[int(d)] for d in dims]
    return call(node.graph, aten.flip.default, source, turned, like=node), order


def _cat(node: Node) -> tuple[Node, Order] | None:
    parts = [_transposed(p) for p in _sequence(node.args[0])]
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(dim, int)
    sources = [p[0] for p in parts if p is not None]
    orders = {p[1] for p in parts if p is not None}
    if len(orders) != 1 or len(sources) != len(parts):
        return None
    (order,) = orders
    return call(node.graph, aten.cat.default, sources, order[dim], like=node), order


def _sequence(value: Any) -> Sequence[Any]:
    assert isinstance(value, (list, tuple))
    return value


def _convolution(node: Node) -> tuple[Node, Order] | None:
    """A convolution with a kernel of ours, which writes the result channels-last."""
    transposed = _transposed(node.args[0])
    if transposed is not None and transposed[1] != _CHANNELS_LAST:
        return None
    if _WRITTEN_LAST in node.meta:
        return None
    new = call(node.graph, _target(node), *node.args, like=node)
    new.meta[_WRITTEN_LAST] = True
    return call(node.graph, aten.permute.default, new, list(_inverse(_CHANNELS_LAST)), like=node), _CHANNELS_LAST


_RULES: dict[Any, Rule] = {
    aten.convolution.default: _convolution,
    aten.permute.default: _permute,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.amax.default: _reduction,
    aten.amin.default: _reduction,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.constant_pad_nd.default: _pad,
    aten.flip.default: _flip,
    aten.cat.default: _cat,
}

PASS = Layout
