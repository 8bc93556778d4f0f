"""Which dimensions of an operator's operands and result have the same index, as the letters of an einsum say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import value_of

aten = torch.ops.aten
prims = torch.ops.prims

Dims = tuple[Hashable | None, ...]

PRODUCTS: frozenset[Any] = frozenset({aten.mm.default, aten.bmm.default})

# Operators that only view or fill, and take the sizes of the result as their second or first argument.
RESHAPES: frozenset[Any] = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
SIZE_ARGUMENT: dict[Any, int] = {**dict.fromkeys(RESHAPES, 1), aten.expand.default: 1, aten.full.default: 0}

_SQUEEZES: frozenset[Any] = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, prims.squeeze.default}
)
_REDUCTIONS: frozenset[Any] = frozenset(
    {aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.mean.dim, aten.all.dim, aten.any.dim}
)
_COPIES: frozenset[Any] = frozenset({aten.clone.default, aten._to_copy.default, prims.convert_element_type.default})


class Labels(NamedTuple):
    """A label for each dimension; equal labels stand for one index.

    Attributes:
        result: of the result. None for a dimension that no operand has.
        operands: of each tensor among the arguments, in their order. None for a dimension that is broadcast. An operand
            has a label that the result lacks if the operator reduces this dimension, or takes a part of it.
    """

    result: Dims
    operands: tuple[Dims, ...]


def operands_of(node: Node) -> list[Node]:
    """Return the nodes among the arguments of `node`, in order, each as often as it is there."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def labels_of(node: Node) -> Labels | None:
    """Return the labels of an operator; None for one that is not known here."""
    target = node.target
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    operands = operands_of(node)
    if not all(isinstance(o.meta.get("val"), torch.Tensor) for o in operands):
        return None
    shapes = [tuple(value_of(o).shape) for o in operands]
    rule = next((rule for operators, rule in _RULES if target in operators), None)
    if rule is not None:
        return rule(node, shapes)
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return _aligned(node, shapes)
    return None


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(value_of(node).shape)


def _aligned(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    """Each element depends on the elements at the same place, after broadcasting."""
    result = _shape(node)

    def dims(shape: Sequence[int]) -> Dims:
        first = len(result) - len(shape)
        return tuple(first + d if size == result[first + d] else None for d, size in enumerate(shape))

    return Labels(tuple(range(len(result))), tuple(map(dims, shapes)))


def _reshaped(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    """A dimension is labelled by the number of elements before it: those with equal labels begin alike."""

    def dims(shape: Sequence[int]) -> Dims:
        return tuple(None if size == 1 else math.prod(shape[:d]) for d, size in enumerate(shape))

    return Labels(dims(_shape(node)), tuple(map(dims, shapes)))


def _permuted(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    order: Any = node.args[1]
    rank = len(order)
    return Labels(tuple(d % rank for d in order), (tuple(range(rank)),))


def _reduced(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    (shape,) = shapes
    given: Any = node.args[1] if len(node.args) > 1 else []
    dims = [given] if isinstance(given, int) else list(given or range(len(shape)))
    gone = {d % len(shape) for d in dims} if shape else set()
    keeps = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
    result = tuple(None if d in gone else d for d in range(len(shape)) if keeps or d not in gone)
    return Labels(result, (tuple(range(len(shape))),))


def _multiplied(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    batch = ("batch",) if node.target is aten.bmm.default else ()
    return Labels((*batch, "m", "n"), ((*batch, "m", "k"), (*batch, "k", "n")))


def _gathered(node: Node, shapes: Sequence[Sequence[int]]) -> Labels | None:
    source, index = shapes
    dim: Any = node.args[1]
    dim %= max(len(source), 1)
    if any(a != b for d, (a, b) in enumerate(zip(source, index, strict=True)) if d != dim):
        return None
    places: Dims = tuple("place" if d == dim else d for d in range(len(index)))
    return Labels(places, (tuple(range(len(source))), places))


def _cut(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    (shape,) = shapes
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim %= len(shape)
    kept = tuple(None if d == dim else d for d in range(len(shape)))
    if node.target is aten.select.int:
        return Labels(tuple(d for d in kept if d is not None), (tuple(range(len(shape))),))
    return Labels(kept, (tuple(range(len(shape))),))


def _padded(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    (shape,) = shapes
    padding: Any = node.args[1]
    first = len(shape) - len(padding) // 2
    dims = tuple(
        d if d < first or not any(padding[2 * (len(shape) - 1 - d) :][:2]) else None for d in range(len(shape))
    )
    return Labels(dims, (dims,))


def _filled(node: Node, shapes: Sequence[Sequence[int]]) -> Labels:
    return Labels(tuple(range(len(_shape(node)))), ())


_Rule = Callable[[Node, Sequence[Sequence[int]]], Labels | None]
_RULES: tuple[tuple[frozenset[Any], _Rule], ...] = (
    (PRODUCTS, _multiplied),
    (RESHAPES | _SQUEEZES, _reshaped),
    (frozenset({aten.permute.default}), _permuted),
    (_REDUCTIONS, _reduced),
    (frozenset({aten.gather.default}), _gathered),
    (frozenset({aten.constant_pad_nd.default}), _padded),
    (frozenset({aten.slice.Tensor, aten.select.int}), _cut),
    (frozenset({aten.full.default}), _filled),
    (_COPIES | {aten.expand.default}, _aligned),
)
