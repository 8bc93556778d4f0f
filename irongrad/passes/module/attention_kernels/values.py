"""The values of which attention consists: matrices of scores, a number for each of their rows, and matrix products.

The letters of dimensions are those of an einsum: `b` is the batch, `r` the rows of a matrix of scores, `c` its columns,
and `d` the dimension of a product that no such matrix has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from iree.compiler import ir

from irongrad.mlir.letters import dimensions_in, is_zero, lettered_source, zero_padding
from irongrad.mlir.linalg import GENERIC, RESHAPES, inputs_of, is_elementwise, is_known_but_first, producer_of
from irongrad.mlir.transposes import Lettered
from irongrad.mlir.walk import block_of

_PRODUCT = "linalg.batch_matmul"

# The types of the elements that are computed, and the dialects of the operations that compute them.
_TYPES = frozenset({"f32", "f64", "bf16", "i1"})
_SCALAR = ("arith.", "math.")

# The operations that reduce a row to a number.
_COMBINERS = frozenset({"arith.addf", "arith.maximumf", "arith.minimumf"})


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch of matrices of scores.

    Attributes:
        batch: the number of matrices; None if it is known at run time alone.
        rows: the rows of each.
        columns: the columns of each.
    """

    batch: int | None
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class Scores:
    """A product whose result is a matrix of scores, such as that of queries and keys.

    Attributes:
        operation: the operation.
        left: the operand with a row for each row of the scores, and its letters: `brd` in any order.
        right: the operand with a row for each column of the scores: `bcd` in any order.
    """

    operation: Any
    left: Lettered
    right: Lettered


@dataclass(frozen=True, eq=False)
class Reader:
    """A product that reads a matrix of scores, such as that of the weights of attention and the values.

    Attributes:
        operation: the operation.
        scores: the matrix, as `matrix_of` returns it.
        other: the other operand and its letters.
        result: the letters of the result, in memory order.
    """

    operation: Any
    scores: Any
    other: Lettered
    result: str

    @property
    def sums_rows(self) -> bool:
        """Whether the product adds over the rows of the scores; else it adds over their columns."""
        return "r" not in self.result


def sizes_of(matrix: Any) -> Sizes:
    """The sizes of a batch of matrices; the dimensions before the last two count as one."""
    *batch, rows, columns = matrix.type.shape
    is_open = any(matrix.type.is_dynamic_dim(d) for d in range(len(batch)))
    return Sizes(None if is_open else math.prod(batch), rows, columns)


def matrix_of(value: Any) -> Any:
    """The value of which `value` is a reshape that joins or splits dimensions before the last two."""
    return _without_reshapes(value, 2)


def numbers_of(value: Any) -> Any:
    """The value of which `value` is a reshape that joins or splits dimensions before the last one."""
    return _without_reshapes(value, 1)


def _without_reshapes(value: Any, last: int) -> Any:
    while producer_of(value) in RESHAPES:
        source = value.owner.operands[0]
        if list(source.type.shape)[-last:] != list(value.type.shape)[-last:]:
            return value
        value = source
    return value


def scores_of(matrix: Any) -> Scores | None:
    """The product that computes a matrix of scores; None if none does."""
    if producer_of(matrix) != _PRODUCT or (lettered := _loops_of(matrix.owner)) is None:
        return None
    of_left, of_right, of_result = lettered
    names = dict(zip(of_result, "brc", strict=True))
    sides = ["".join(names.get(loop, "d") for loop in loops) for loops in (of_left, of_right)]
    operands = [_read(v, s) for v, s in zip(list(matrix.owner.operands)[:2], sides, strict=True)]
    by_rows = {"r" in s: o for s, o in zip(sides, operands, strict=True)}
    if sorted(map(sorted, sides)) != [sorted("bcd"), sorted("bdr")]:
        return None
    return Scores(matrix.owner.operation, by_rows[True], by_rows[False])


def readers_in(product: Any) -> list[Reader]:
    """The ways to take a product for one that reads a matrix of scores: that may be its left or its right operand."""
    if product.name != _PRODUCT or (lettered := _loops_of(product)) is None:
        return []
    *of_operands, of_result = lettered
    found = []
    for place, loops in enumerate(of_operands):
        value, source = lettered_source(product.operands[place], loops)
        names = dict(zip(source, "brc", strict=False))
        sides = ["".join(names.get(loop, "d") for loop in one) for one in lettered]
        other = _read(product.operands[1 - place], sides[1 - place])
        if len(source) == 3 and source[0] == of_result[0] and sides[2][0] == "b":
            found.append(Reader(product, matrix_of(value), other, sides[2]))
    return found


def _read(value: Any, letters: str) -> Lettered:
    """An operand of a product: `lettered_source`, unless a number of matrices that is unknown lies within it."""
    source, of_source = lettered_source(value, letters)
    is_read = source.type.has_static_shape or (is_known_but_first(source.type) and of_source[0] == "b")
    return (source, of_source) if is_read else (value, letters)


def _loops_of(product: Any) -> list[str] | None:
    """A letter for each loop that an operand or the result of a product has.

    None unless it begins with zeros, or if another size than the number of matrices is unknown.
    """
    kinds = [value.type for value in product.operands]
    known = str(kinds[2].element_type) == "f32" and is_zero(product.operands[2])
    if not known or not {str(k.element_type) for k in kinds} <= {"f32", "bf16"}:
        return None
    lettered = ["".join("wxyz"[d] for d in dimensions_in(m.value)) for m in product.attributes["indexing_maps"]]
    matrices = lettered[2][0] if kinds[2].is_dynamic_dim(0) else ""
    return lettered if all(_is_known_but_for(k, of, matrices) for k, of in zip(kinds, lettered, strict=True)) else None


def _is_known_but_for(kind: Any, loops: Sequence[Any], first: Any) -> bool:
    """Whether all sizes of a tensor are known, besides perhaps that of its first dimension, if its loop is `first`."""
    return kind.has_static_shape or (is_known_but_first(kind) and loops[0] == first)


def is_plain(operation: Any) -> bool:
    """Whether an operation computes each element of its one result from elements at the same place, or shared ones."""
    if not is_elementwise(operation) or len(operation.results) != 1:
        return False
    *of_inputs, of_result = [m.value for m in operation.attributes["indexing_maps"]]
    block = operation.regions[0].blocks[0]
    body = [op.operation for op in block]
    kinds, of_whole = [v.type for v in inputs_of(operation)], operation.results[0].type
    is_open = of_whole.rank > 0 and of_whole.is_dynamic_dim(0)
    return (
        is_known_but_first(of_whole)
        and of_result == ir.AffineMap.get_identity(of_result.n_dims)
        and all(map(_is_known_but_for, kinds, map(dimensions_in, of_inputs), repeat(0 if is_open else None)))
        and all(_is_ordered(m) for m in of_inputs)
        and not list(block.arguments[-1].uses)
        and all(op.name.startswith(_SCALAR) and not op.regions for op in body[:-1])
        and all(str(v.type) in _TYPES for op in body for v in (*op.operands, *op.results))
        and all(block_of(v) == block or producer_of(v) == "arith.constant" for op in body for v in op.operands)
    )


def _is_ordered(indexing: Any) -> bool:
    """Whether the dimensions of an operand are loops in their order."""
    places = dimensions_in(indexing)
    return -1 not in places and places == sorted(set(places))


@dataclass(frozen=True, eq=False)
class Reduction:
    """The sum of each row of a matrix, or its largest or least element.

    Attributes:
        matrix: the matrix.
        operations: the operations that compute it: two if a long row is summed in parts, and one more that pads it if
            the parts do not divide it.
    """

    matrix: Any
    operations: tuple[Any, ...]


def reduction_of(operation: Any) -> Reduction | None:
    """What an operation computes of each row of a matrix; None if it is no reduction of rows."""
    reduced = _reduced(operation)
    if reduced is None:
        return None
    if producer_of(reduced) != GENERIC or len(list(reduced.uses)) > 1:
        return Reduction(reduced, (operation,))
    before = reduced.owner.operation
    parts = _reduced(before)
    if parts is None or producer_of(parts) != "tensor.expand_shape" or combiner_of(before) != combiner_of(operation):
        return Reduction(reduced, (operation,))
    row = parts.owner.operands[0]  # behind it are sizes that are known at run time alone
    *rows, _, _ = parts.type.shape
    if rows != list(row.type.shape)[:-1]:
        return None
    padding = zero_padding(row)
    if padding is None or combiner_of(operation) != "arith.addf":
        return Reduction(row, (before, operation))
    matrix, first, last = padding
    is_of_columns = not any(first) and not any(last[:-1]) and last[-1] >= 0
    return Reduction(matrix, (row.owner.operation, before, operation)) if is_of_columns else None


def _reduced(operation: Any) -> Any | None:
    """The tensor of float32 that an operation reduces along its last dimension; None if it does anything else."""
    if operation.name != GENERIC or len(inputs_of(operation)) != 1 or len(operation.results) != 1:
        return None
    (tensor,) = inputs_of(operation)
    rank = len(tensor.type.shape)
    of_input, of_result = [m.value for m in operation.attributes["indexing_maps"]]
    if of_input != ir.AffineMap.get_identity(rank) or dimensions_in(of_result) != list(range(rank - 1)):
        return None
    block = operation.regions[0].blocks[0]
    first, *others = [op.operation for op in block]
    known = first.name in _COMBINERS and len(others) == 1 and list(others[0].operands) == [first.result]
    if not known or {*first.operands} != {*block.arguments} or begins_with(operation) is None:
        return None
    return tensor if str(tensor.type.element_type) == "f32" and is_known_but_first(tensor.type) else None


def combiner_of(reduction: Any) -> str:
    """The name of the operation by which a reduction joins two numbers."""
    return str(next(iter(reduction.regions[0].blocks[0])).operation.name)


def begins_with(operation: Any) -> float | None:
    """The number with which a reduction begins, if it changes nothing however often it is combined; else None."""
    room = operation.operands[1]
    if producer_of(room) != "linalg.fill" or producer_of(room.owner.operands[0]) != "arith.constant":
        return None
    number = float(ir.FloatAttr(room.owner.operands[0].owner.attributes["value"]).value)
    return number if combiner_of(operation) != "arith.addf" or number == 0 else None


def quotient_of(matrix: Any) -> tuple[int, int] | None:
    """Which inputs of an elementwise operation it divides, the first by the second; None if it does anything else."""
    block = matrix.owner.regions[0].blocks[0]
    first, *others = [op.operation for op in block]
    if first.name != "arith.divf" or len(others) != 1 or str(first.result.type) != "f32":
        return None
    places = {argument: i for i, argument in enumerate(block.arguments)}
    found = [places[operand] for operand in first.operands if operand in places]
    return (found[0], found[1]) if len(found) == 2 else None
