"""Constant folding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from irongrad.graph.float64_runs import in_float64
from irongrad.graph.movements import OF_ONE_TENSOR, operators
from irongrad.graph.nodes import call, value_of
from irongrad.graph.purity import is_mergeable
from irongrad.operators.legalize.constants import SMALL
from irongrad.passes.base import Context, PassResult
from irongrad.passes.rules.patterns import drop

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class ConstantFolding:
    """Compute at compile time the values that depend on no argument.

    Before:
        a = full_like(x, 1); b = mul(a, 0.5); c = arange(0, 3); d = mul(c, 2); return (b, d)
    After:
        a = full([8, 8], 0.5); b = [0, 2, 4]; return (a, b)

    A tensor of equal elements becomes `full`, whatever its size. Any other tensor becomes `arange` or a literal, if it
    has at most `limit` elements. Equal literals share one attribute. The values are those that eager computes, in its
    dtypes and in float64. A value is not folded if it rounds differently on the way than once at the end. Nor are
    boolean tensors of unequal elements, which cannot be literals (see `irongrad.pipeline.lower.literals`).

    Attributes:
        limit: the most elements of a tensor that is folded to `arange` or a literal.
    """

    name: ClassVar[str] = "fold"
    limit: int = SMALL

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        return fold_constants(graph, self.limit)


@dataclass(frozen=True)
class Constant:
    """The known value of a node.

    Attributes:
        narrow: the value in its own dtype; one element if all elements are equal.
        wide: the same value, computed in float64 throughout.
    """

    narrow: torch.Tensor
    wide: torch.Tensor

    @property
    def is_splat(self) -> bool:
        """Whether all elements are one number."""
        return bool(self.narrow.numel() == 1)

    @property
    def is_exact(self) -> bool:
        """Whether the value can be written exactly: as a float64 number, or as elements of its own dtype.

        PyTorch refuses to fill a tensor with a finite number that overflows the tensor's dtype.
        """
        if self.is_splat:
            overflows = bool((self.wide.isfinite() & self.narrow.isinf()).any())
            return not overflows and _equal(self.wide.to(self.narrow.dtype), self.narrow)
        return self.narrow.dtype is not torch.bool and _equal(in_float64(self.narrow), self.wide)


def fold_constants(graph: GraphModule, limit: int) -> PassResult:
    """Replace every constant that a non-constant node uses, unless it is in its simplest form already."""
    known: dict[Node, Constant] = {}
    inexact: set[Node] = set()
    for node in graph.graph.nodes:
        constant = _evaluated(graph, node, known, limit)
        if constant is not None and constant.is_exact:
            known[node] = constant
        elif constant is not None:
            inexact.add(node)
    folded: list[Node] = []
    for node, constant in known.items():
        if _is_simplest(node, constant) or all(user in known for user in node.users):
            continue
        # IREE 3.13.0 hoists a mask of literals as a constant expression. It then cannot pack the mask's i1 elements
        # ("'linalg.pack' op expected padding_value has 'i8' but got: 'i1'").
        if not constant.is_splat and not inexact.isdisjoint(node.users):
            continue
        with graph.graph.inserting_before(node):
            new = _constant_node(graph, node, constant)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in known)
        folded.append(node)
    for node in folded:
        drop(node)
    return PassResult(bool(folded), {"folded": len(folded)})


def _is_simplest(node: Node, constant: Constant) -> bool:
    """Whether `node` is the node that `_constant_node` would make of its value."""
    if node.target is aten.full.default:
        is_number = type(node.args[1]) is type(constant.wide.item())
        return is_number and node.kwargs == {"dtype": value_of(node).dtype}
    return node.target is aten.arange.start_step or node.op == "get_attr"


# Operators that fill a tensor with one number, with that number.
_FILLED: Mapping[Any, Callable[[Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda node: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: 1),
}

_LITERAL_PREFIX = "folded_"

_UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def _evaluated(graph: GraphModule, node: Node, known: Mapping[Node, Constant], limit: int) -> Constant | None:
    """The value of `node`; None if it is unknown, is no tensor, or should not be folded."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return None
    if value.dtype is torch.uint8:
        # torch-mlir 20261001 reads uint8 constants as signed bytes (see `irongrad.operators.legalize.constants`)
        return None
    if node.op == "get_attr":
        tensor = getattr(graph, str(node.target))
        return _constant(tensor, in_float64(tensor)) if value.numel() <= limit else None
    if node.target in _FILLED:
        number = _FILLED[node.target](node)
        narrow = torch.full([1] * value.ndim, number, dtype=value.dtype)
        return Constant(narrow, torch.full([1] * value.ndim, number, dtype=in_float64(value.dtype)))
    if not isinstance(node.target, OpOverload) or not is_mergeable(node) or _is_undefined(node.target):
        return None
    sources = node.all_input_nodes
    if any(source not in known for source in sources):
        return None
    if sources and all(known[s].is_splat for s in sources) and (splat := _splat(node, known)) is not None:
        return splat
    if max(value.numel(), *(value_of(s).numel() for s in sources), 0) > limit:
        return None
    return _constant(*(_run(node, known, wide, whole=True) for wide in (False, True)))


def _is_undefined(operator: OpOverload) -> bool:
    return operator._overloadpacket.__name__ in _UNDEFINED


def _splat(node: Node, known: Mapping[Node, Constant]) -> Constant | None:
    """The result of an operator whose operands are splats, computed on one element; None if it may not be a splat."""
    ndim = value_of(node).ndim
    if node.target in operators(OF_ONE_TENSOR):
        source = known[node.all_input_nodes[0]]
        return Constant(source.narrow.reshape([1] * ndim), source.wide.reshape([1] * ndim))
    assert isinstance(node.target, OpOverload)
    if torch.Tag.pointwise not in node.target.tags:
        return None
    return Constant(*(_run(node, known, wide, whole=False) for wide in (False, True)))


def _run(node: Node, known: Mapping[Node, Constant], wide: bool, whole: bool) -> torch.Tensor:
    def value(source: Node) -> torch.Tensor:
        tensor = known[source].wide if wide else known[source].narrow
        return tensor.expand(value_of(source).shape) if whole else tensor

    args, kwargs = map_arg((node.args, node.kwargs), value)
    if wide:
        args, kwargs = tree_map(in_float64, (args, kwargs))
    assert callable(node.target)
    with torch.no_grad():
        result: torch.Tensor = node.target(*args, **kwargs)
    return result.contiguous()


def _constant(narrow: torch.Tensor, wide: torch.Tensor) -> Constant:
    """The constant of these elements; one element if all are equal."""
    one = [slice(0, 1)] * narrow.ndim
    if all(_equal(t, t[tuple(one)].expand(t.shape)) for t in (narrow, wide)):
        return Constant(narrow[tuple(one)], wide[tuple(one)])
    return Constant(narrow, wide)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, except for the payloads of nan."""
    if one.is_complex() and other.is_complex():
        return _equal(torch.view_as_real(one), torch.view_as_real(other))
    numbers = ~one.isnan()
    pairs = (
        (numbers, ~other.isnan()),
        (one[numbers], other[numbers]),
        (one[numbers].signbit(), other[numbers].signbit()),
    )
    return all(torch.equal(a, b) for a, b in pairs)


def _constant_node(graph: GraphModule, node: Node, constant: Constant) -> Node:
    """Add a node for `constant` before `node`."""
    value = value_of(node)
    if constant.is_splat:
        number = constant.wide.item()
        return call(graph.graph, aten.full.default, list(value.shape), number, dtype=value.dtype, like=node)
    if value.dtype is torch.int64 and torch.equal(constant.narrow, torch.arange(value.numel())):
        return call(graph.graph, aten.arange.start_step, 0, value.numel(), like=node)
    new = graph.graph.get_attr(_literal_name(graph, constant.narrow.reshape(value.shape)))
    new.meta = dict(node.meta)
    return new


def _literal_name(graph: GraphModule, elements: torch.Tensor) -> str:
    """The attribute of `graph` that holds `elements`. Equal elements share one, so they are common subexpressions."""
    buffers = graph.named_buffers(recurse=False)
    literals: dict[str, torch.Tensor] = {name: tensor for name, tensor in buffers if name.startswith(_LITERAL_PREFIX)}
    for name, tensor in literals.items():
        if (tensor.dtype, tensor.shape) == (elements.dtype, elements.shape) and _equal(tensor, elements):
            return name
    graph.register_buffer(name := f"{_LITERAL_PREFIX}{len(literals)}", elements)
    return name


PASS = ConstantFolding
