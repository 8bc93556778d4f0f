"""Sums of products of two tensors, written as `linalg.generic`: convolutions and their gradients."""

from __future__ import annotations

from typing import Any, TypeAlias

from iree.compiler import ir

from irongrad.mlir.letters import is_zero
from irongrad.mlir.linalg import GENERIC, inputs_of

_MULTIPLIES_AND_ADDS = ["arith.mulf", "arith.addf", "linalg.yield"]

# A dimension of an operand: the numbers of its loops, each with the factor of its index.
Dimension: TypeAlias = tuple[tuple[int, int], ...]


def is_sum_of_products(operation: Any) -> bool:
    """Whether an operation adds products of two tensors of float32 of known sizes, beginning at zero."""
    if operation.name != GENERIC or len(inputs_of(operation)) != 2 or len(operation.results) != 1:
        return False
    kinds = [value.type for value in operation.operands]
    if not all(kind.has_static_shape and str(kind.element_type) == "f32" for kind in kinds):
        return False
    body = operation.regions[0].blocks[0]
    names = [op.operation.name for op in body]
    if names != _MULTIPLIES_AND_ADDS or not is_zero(operation.operands[2]):
        return False
    multiply, add = (body.operations[i].operation for i in range(2))
    arguments = list(body.arguments)
    return set(multiply.operands) == set(arguments[:2]) and set(add.operands) == {multiply.result, arguments[2]}


def dimensions_of(indexing: Any) -> list[Dimension | None]:
    """The loops of each dimension of an operand; None for a dimension that is not one loop, or a sum of two."""
    return [_terms(expression) for expression in indexing.results]


def _terms(expression: Any) -> Dimension | None:
    sides = [expression.lhs, expression.rhs] if isinstance(expression, ir.AffineAddExpr) else [expression]
    terms = [_term(side) for side in sides]
    return None if None in terms else tuple(term for term in terms if term is not None)


def _term(expression: Any) -> tuple[int, int] | None:
    """The number of a loop and the factor of its index."""
    factor = 1
    if isinstance(expression, ir.AffineMulExpr) and isinstance(expression.rhs, ir.AffineConstantExpr):
        expression, factor = expression.lhs, expression.rhs.value
    return (expression.position, factor) if isinstance(expression, ir.AffineDimExpr) else None
