"""Sums of products of two tensors, written as `linalg.generic`: convolutions and their gradients."""

from __future__ import annotations

from typing import Any, TypeAlias

from iree.compiler import ir

from irongrad.mlir.letters import is_zero
from irongrad.mlir.linalg import GENERIC, inputs_of, reduces
from irongrad.mlir.transposes import copied
from irongrad.mlir.walk import inside

_MULTIPLIES_AND_ADDS = ["arith.mulf", "arith.addf", "linalg.yield"]

# A dimension of an operand: the numbers of its loops, each with the factor of its index.
Dimension: TypeAlias = tuple[tuple[int, int], ...]


def sums_of_products_in(module: ir.Module) -> list[Any]:
    """The operations of a module that add products of two tensors of float32 of known sizes, beginning at zero.

    IREE 3.13.0 lets some of them widen an operand of half precision in their own body. Here such an operand is widened
    by an operation of its own, so that there is one form of them.
    """
    operations = list(inside(module.operation))
    for operation in operations:
        if operation.name == GENERIC and reduces(operation) and _widening(operation):
            _widen_before(operation)
    return [op for op in operations if _is_sum_of_products(op)]


def _widening(operation: Any) -> list[Any]:
    """The operations in the body of a `linalg.generic` that widen an input, each the one reader of it."""
    body = operation.regions[0].blocks[0]
    arguments = list(body.arguments)[: len(inputs_of(operation))]
    uses = [[use.owner.operation for use in argument.uses] for argument in arguments]
    return [of[0] for of in uses if len(of) == 1 and of[0].name == "arith.extf"]


def _widen_before(operation: Any) -> None:
    """Widen the inputs of a `linalg.generic` by operations before it."""
    for widening in _widening(operation):
        argument, wide = widening.operands[0], widening.results[0].type
        letters = "".join(chr(ord("a") + d) for d in range(len(operation.operands[argument.arg_number].type.shape)))
        with operation.location, ir.InsertionPoint(operation):
            whole = copied((operation.operands[argument.arg_number], letters), letters, wide)
        operation.operands[argument.arg_number] = whole
        argument.set_type(wide)
        widening.results[0].replace_all_uses_with(argument)
        widening.erase()


def _is_sum_of_products(operation: Any) -> bool:
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
