"""Write the code of what attention does with the scores of a row: numbers of the row, and vectors of its columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, vector
from iree.compiler.dialects import math as math_dialect

from irongrad.mlir.loop_code import Lanes, computed, constant, fixed, number, vector_of, zeros
from irongrad.passes.module.attention_kernels.memory import Memory
from irongrad.passes.module.attention_kernels.region import Input
from irongrad.passes.module.attention_kernels.values import quotient_of


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a group.

    Attributes:
        memory: the memory of the kernel.
        first: the first row of the group.
        column: the first column of the block of columns.
        row: the number of the row in the group.
        known: the numbers that are there.
        reciprocals: the factors of the reciprocals that are there, by number.
    """

    memory: Memory
    first: Any
    column: Any
    row: Any
    known: dict[Any, Any] = field(default_factory=dict)
    reciprocals: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def prepare(self, value: Any, visit: int) -> None:
        """Write code for all of the row that a visit needs to compute a matrix, or to reduce one."""
        kernel = self.memory.kernel
        matrix = value in kernel.region.matrices
        for one in kernel.region.inputs(value):
            if matrix and _is_of_rows(one, value):
                self.input(one, value.type.shape[:-2])
            elif one.inside is not None and not kernel.is_stored(one.inside, visit):
                self.prepare(one.inside, visit)
        if matrix and (quotient := _quotient(kernel.region.inputs(value), value)) is not None:
            self.factors(self.input(quotient[1], value.type.shape[:-2]))

    def number(self, value: Any) -> Any:
        """The number of the row that `value` has."""
        if value not in self.known:
            self.known[value] = self._computed(value)
        return self.known[value]

    def _computed(self, value: Any) -> Any:
        kernel = self.memory.kernel
        if value in kernel.reductions:
            return memref.load(self.memory.numbers[kernel.reductions.index(value)], [self.row])
        given = [self.input(i, value.type.shape[:-1]) for i in kernel.region.inputs(value)]
        return computed(value.owner, given, None)

    def input(self, one: Input, batch: Sequence[int]) -> Any:
        """A number of an input that is the same for all columns; `batch` are the sizes of the loops over the batch."""
        if one.inside is not None:
            return self.number(one.inside)
        key = one.value, *one.loops
        if key not in self.known:
            kind = one.value.type
            loaded = memref.load(self.memory.read[one.value], [self.place(one.loops, kind.shape, batch)])
            is_bit = loaded.type != kind.element_type
            self.known[key] = arith.trunci(kind.element_type, loaded) if is_bit else loaded
        return self.known[key]

    def factors(self, divisor: Any) -> tuple[Any, Any]:
        """Two factors whose product is the reciprocal of a number.

        The first one is a power of two. With it, the second is neither infinite nor denormal.
        """
        if divisor not in self.reciprocals:
            one, small, large = (splat(x, divisor.type) for x in (1.0, 2.0**-64, 2.0**64))
            size = math_dialect.absf(divisor)
            is_small, is_large = (
                arith.cmpf(predicate, size, limit)
                for predicate, limit in ((arith.CmpFPredicate.OLT, small), (arith.CmpFPredicate.OGT, large))
            )
            power = arith.select(is_small, large, arith.select(is_large, small, one))
            self.reciprocals[divisor] = power, arith.divf(one, arith.mulf(divisor, power))
        return self.reciprocals[divisor]

    def place(self, loops: Sequence[int], shape: Sequence[int], batch: Sequence[int], column: Any = None) -> Any:
        """The index of an element in memory.

        Args:
            loops: for each dimension of a tensor, the loop that runs over it: of `batch`, then the rows, the columns.
            shape: the sizes of these dimensions.
            batch: the sizes of the dimensions that together are the batch; the first one may be unknown.
            column: the column; None for the first one.
        """
        b, f, r, c = (ir.AffineExpr.get_dim(i) for i in range(4))
        of_batch = [ir.AffineExpr.get_floor_div(b, math.prod(batch[i + 1 :])) for i in range(len(batch))]
        of_batch[1:] = [n % size for n, size in zip(of_batch[1:], batch[1:], strict=True)]
        indices = [*of_batch, f + r, c]
        expression = fixed(0)
        for i, d in enumerate(loops):
            expression = expression + indices[d] * math.prod(shape[i + 1 :])
        column = constant(0) if column is None else column
        return number(expression, self.memory.matrix, self.first, self.row, column)


@dataclass(frozen=True, eq=False)
class Point:
    """A vector of columns of a row.

    Attributes:
        row: the row.
        visit: the number of the visit.
        column: the first column, without `beyond`.
        beyond: so many columns behind it.
        lanes: how the vector is read.
        known: the vectors that are there, by matrix.
    """

    row: Row
    visit: int
    column: Any
    beyond: int
    lanes: Lanes
    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def in_scores(self) -> Any:
        """The index of the vector in the memory of a matrix."""
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        return number(r * self.row.memory.kernel.stride + c + self.beyond, self.row.row, self.column)

    def value(self, matrix: Any) -> Any:
        """The vector of a matrix."""
        if matrix not in self.known:
            self.known[matrix] = self._computed(matrix)
        return self.known[matrix]

    def _computed(self, matrix: Any) -> Any:
        kernel = self.row.memory.kernel
        if kernel.is_stored(matrix, self.visit):
            memory = self.row.memory.scores[kernel.buffers[matrix]]
            return _restored(self.lanes.load(memory, self.in_scores), matrix.type.element_type)
        inputs = kernel.region.inputs(matrix)
        if (quotient := _quotient(inputs, matrix)) is not None:
            return self._divided(*quotient, matrix)
        return computed(matrix.owner, [self._input(i, matrix) for i in inputs], kernel.width)

    def _divided(self, one: Input, by: Input, matrix: Any) -> Any:
        """The vector of an input, divided by a number of the row: multiplied by factors, which the whole row shares."""
        value = self._input(one, matrix)
        for factor in self.row.factors(self.row.input(by, matrix.type.shape[:-2])):
            value = arith.mulf(value, vector.broadcast(value.type, factor))
        return value

    def _input(self, one: Input, matrix: Any) -> Any:
        kernel, batch = self.row.memory.kernel, matrix.type.shape[:-2]
        kind = ir.VectorType.get([kernel.width], one.value.type.element_type)
        if _is_of_rows(one, matrix):
            return vector.broadcast(kind, self.row.input(one, batch))
        if one.inside is not None:
            return self.value(one.inside)
        memory = self.row.memory.read[one.value]
        c, f = (ir.AffineExpr.get_dim(i) for i in range(2))
        column = number(c + f + self.beyond, self.column, self.row.column)
        place = self.row.place(one.loops, one.value.type.shape, batch, column)
        loaded = self.lanes.load(memory, place)
        return loaded if loaded.type == kind else arith.trunci(kind, loaded)

    def store(self, matrix: Any, value: Any) -> None:
        """Write code that keeps the vector of a matrix."""
        memory = self.row.memory
        self.lanes.store(_kept(value), memory.scores[memory.kernel.buffers[matrix]], self.in_scores)


def _is_of_rows(one: Input, matrix: Any) -> bool:
    """Whether an input of a matrix is the same for all columns."""
    return len(matrix.type.shape) - 1 not in one.loops


def _quotient(inputs: Sequence[Input], matrix: Any) -> tuple[Input, Input] | None:
    """The two inputs of a division by a number of the row; None if a matrix is computed by anything else."""
    places = quotient_of(matrix)
    if places is None or not _is_of_rows(inputs[places[1]], matrix):
        return None
    return inputs[places[0]], inputs[places[1]]


def splat(value: float | None, kind: ir.Type) -> Any:
    """A number, or a vector of equal ones."""
    if not isinstance(kind, ir.VectorType):
        return arith.constant(kind, ir.FloatAttr.get(kind, value))
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, value)))


def _kept(values: Any) -> Any:
    """A vector of a matrix as float32."""
    element = values.type.element_type
    kind = vector_of(values.type.shape[0])
    if str(element) == "i1":
        return arith.uitofp(kind, values)
    return values if values.type == kind else arith.extf(kind, values)


def _restored(values: Any, element: ir.Type) -> Any:
    """What `_kept` made float32 of."""
    kind = ir.VectorType.get(values.type.shape, element)
    if str(element) == "i1":
        return arith.cmpf(arith.CmpFPredicate.UNE, values, zeros(values.type))
    return values if values.type == kind else arith.truncf(kind, values)
