"""Sums of products of two tensors, written as `linalg.generic`: convolutions and their gradients."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any, TypeAlias

from iree.compiler import ir

from irongrad.mlir.letters import is_zero
from irongrad.mlir.linalg import GENERIC, has_known_sizes, inputs_of, is_known_but_first
from irongrad.mlir.transposes import copied
from irongrad.mlir.walk import inside

_WIDENS = "arith.extf"
_MULTIPLIES_AND_ADDS = ["arith.mulf", "arith.addf", "linalg.yield"]

# A dimension of an operand: the numbers of its loops, each with the factor of its index.
Dimension: TypeAlias = tuple[tuple[int, int], ...]


def sums_of_products_in(module: ir.Module) -> list[Any]:
    """The operations of a module that add products of two tensors of float32, beginning at zero.

    All sizes are known but the first of a tensor. IREE 3.13.0 lets some of them widen an operand of half precision in
    their own body. Here such an operand is widened by an operation of its own, so that there is one form of them.
    """
    operations = [op for op in inside(module.operation) if op.name == GENERIC and _multiplies_and_adds(op)]
    for operation in operations:
        _widen_before(operation)
    return [op for op in operations if _adds_products(op)]


def _multiplies_and_adds(operation: Any) -> bool:
    """Whether a `linalg.generic` of two inputs does nothing else, besides widening the inputs."""
    operands = list(operation.operands)
    if len(inputs_of(operation)) != 2 or len(operands) != 3 or not all(is_known_but_first(v.type) for v in operands):
        return False
    return [name for name in _names(operation) if name != _WIDENS] == _MULTIPLIES_AND_ADDS


def _names(operation: Any) -> list[str]:
    """The names of the operations in the body of a `linalg.generic`."""
    return [op.operation.name for op in operation.regions[0].blocks[0]]


def _widen_before(operation: Any) -> None:
    """Widen the inputs of a `linalg.generic` by operations before it, not in its body."""
    body = operation.regions[0].blocks[0]
    for place, argument in enumerate(list(body.arguments)[: len(inputs_of(operation))]):
        readers = [use.owner.operation for use in argument.uses]
        if len(readers) != 1 or readers[0].name != _WIDENS:
            continue
        (wide,) = readers[0].results
        value = operation.operands[place]
        letters = ascii_lowercase[: len(value.type.shape)]
        with operation.location, ir.InsertionPoint(operation):
            operation.operands[place] = copied((value, letters), letters, wide.type)
        argument.set_type(wide.type)
        wide.replace_all_uses_with(argument)
        readers[0].erase()


def is_sum_of_products(operation: Any) -> bool:
    """Whether a `linalg.generic` adds products of two tensors of float32 of known sizes, beginning at zero."""
    return has_known_sizes(operation) and _adds_products(operation)


def _adds_products(operation: Any) -> bool:
    if not _multiplies_and_adds(operation):
        return False
    is_single = all(str(value.type.element_type) == "f32" for value in operation.operands)
    body = operation.regions[0].blocks[0]
    if not is_single or _names(operation) != _MULTIPLIES_AND_ADDS or not is_zero(operation.operands[2]):
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
