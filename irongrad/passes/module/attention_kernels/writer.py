"""Write the code of attention: a thread computes the scores of a group of rows, and all that is read of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, hal, memref, scf, vector
from iree.compiler.dialects import math as math_dialect

from irongrad.mlir.loop_code import (
    Lanes,
    computed,
    constant,
    each,
    fixed,
    least,
    loop,
    new_executable,
    number,
    row_of,
    vector_of,
    zeros,
)
from irongrad.passes.module.attention_kernels.hidden import UNIT
from irongrad.passes.module.attention_kernels.kernel import AttentionKernel, Operand, strides_of
from irongrad.passes.module.attention_kernels.product_code import Dimension, Limit, ProductCode, Side
from irongrad.passes.module.attention_kernels.region import Input
from irongrad.passes.module.attention_kernels.values import begins_with, combiner_of, quotient_of

# How many vectors of a row are computed at once, if they divide it: their chains of operations overlap.
_AT_ONCE = (4, 3, 2, 1)


def executable_of(kernel: AttentionKernel, name: str) -> Any:
    """A kernel as an operation `stream.executable`, with one entry point; both are called `name`."""
    counts = kernel.parts, kernel.region.sizes.batch, 1
    tensors = len(kernel.read) + kernel.hides + len(kernel.made)
    with new_executable(name, counts, tensors, kernel.operations) as (executable, bindings):
        _Writer.of(kernel, bindings).write()
    return executable


def _stored_type(element: ir.Type) -> ir.Type:
    """The type of an element in memory: IREE stores a bit in a byte."""
    return ir.IntegerType.get_signless(8) if str(element) == "i1" else element


def _first_integer(binding: Any) -> Any:
    """The first of the two 32-bit integers of a tensor, as an index."""
    memory = row_of(binding, 2, ir.IntegerType.get_signless(32))
    return arith.index_cast(ir.IndexType.get(), memref.load(memory, [constant(0)]))


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes the code of one workgroup.

    Attributes:
        kernel: the kernel.
        read: the memory of each tensor that is read.
        results: the memory of the results of readers, then of numbers of rows.
        scores: the memory of the thread for matrices, by `AttentionKernel.buffers`.
        numbers: its memory for reductions, in the order of `AttentionKernel.reductions`.
        matrix: the number of the matrix in the batch.
        part: the number of the part of its groups.
        seen: how many columns of the first row count; None if all do.
    """

    kernel: AttentionKernel
    read: dict[Any, Any]
    results: Sequence[Any]
    scores: Sequence[Any]
    numbers: Sequence[Any]
    matrix: Any
    part: Any
    seen: Any | None

    @classmethod
    def of(cls, kernel: AttentionKernel, bindings: Sequence[Any]) -> _Writer:
        """A writer for a function with the arguments `bindings`."""
        given = len(kernel.read)
        of_tensors = [*bindings[:given], *bindings[given + kernel.hides :]]
        kinds = [*(v.type for v in kernel.read), *kernel.made]
        memory = [
            row_of(b, math.prod(k.shape), _stored_type(k.element_type)) for b, k in zip(of_tensors, kinds, strict=True)
        ]
        rows, _, larger = kernel.group
        rows += larger > 0
        of_scores = ir.MemRefType.get([rows * kernel.stride], ir.F32Type.get())
        of_numbers = ir.MemRefType.get([rows], ir.F32Type.get())
        scores = [memref.alloca(of_scores, [], [], alignment=64) for _ in range(1 + max(kernel.buffers.values()))]
        numbers = [memref.alloca(of_numbers, [], [], alignment=64) for _ in kernel.reductions]
        part, matrix = (hal.interface_workgroup_id(i) for i in range(2))
        read = dict(zip(kernel.read, memory, strict=False))
        seen = _first_integer(bindings[given]) if kernel.hides else None
        return cls(kernel, read, memory[given:], scores, numbers, matrix, part, seen)

    def write(self) -> None:
        """Write the code at the current insertion point."""
        with each(constant(0), constant(self.kernel.region.sizes.columns), self.kernel.block) as column:
            self._write_block(column)

    def _write_block(self, column: Any) -> None:
        """Write the code of the columns that begin at `column`: the last rows, which see the most columns, first."""
        rows, groups, larger = self.kernel.group
        d, e = (ir.AffineExpr.get_dim(i) for i in range(2))
        of_part = self.kernel.groups_of_part
        begin = number(d * of_part, self.part)
        end = least([d + of_part, fixed(groups)], begin)
        with each(begin, end, 1) as index:
            group = number(e - 1 - d, number(d - e, index, begin), end)
            is_later = arith.cmpi(arith.CmpIPredicate.ne, index, begin)
            if not larger:
                self._write_group(column, number(d * rows, group), rows, is_later)
                return
            is_larger = arith.cmpi(arith.CmpIPredicate.ult, group, constant(larger))
            branches = scf.IfOp(is_larger, has_else=True)
            for block, first, count in (
                (branches.then_block, d * (rows + 1), rows + 1),
                (branches.else_block, d * rows + larger, rows),
            ):
                with ir.InsertionPoint(block):
                    self._write_group(column, number(first, group), count, is_later)
                    scf.yield_([])

    def _write_group(self, column: Any, first: Any, count: int, is_later: Any) -> None:
        """Write the code of a group of `count` rows that begins at the row `first`."""
        kernel, columns = self.kernel, self.kernel.region.sizes.columns
        if self.seen is None:
            _Group(self, column, first, count, is_later).write()
            return
        f, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        seen = least([f + c + count - 1, fixed(columns)], first, self.seen)
        if kernel.sums_rows:  # the first group writes the sums of all columns
            seen = arith.select(is_later, seen, constant(columns))
        units = number(ir.AffineExpr.get_ceil_div(f - c, UNIT) * UNIT, seen, column)
        end = least([f, fixed(kernel.block)], units)
        with ir.InsertionPoint(scf.IfOp(arith.cmpi(arith.CmpIPredicate.sgt, end, constant(0))).then_block):
            _Group(self, column, first, count, is_later, end).write()
            scf.yield_([])


@dataclass(frozen=True, eq=False)
class _Group:
    """A group of rows, and a block of columns.

    Attributes:
        writer: the writer of the kernel.
        column: the first column of the block.
        first: the first row of the group.
        count: the number of rows.
        is_later: whether the part has had a group before.
        end: how many columns of the block count, a multiple of `UNIT`; None if all do.
    """

    writer: _Writer
    column: Any
    first: Any
    count: int
    is_later: Any
    end: Any = None

    def write(self) -> None:
        """Write the code of the group."""
        writer, kernel = self.writer, self.writer.kernel
        for matrix, product in kernel.products.items():
            left = self._side(product.left, "r", "d")
            right = self._side(product.right, "d", "c")
            result = Side(writer.scores[kernel.buffers[matrix]], constant(0), kernel.stride)
            sizes = self.count, kernel.block, product.summands
            ProductCode(*sizes, kernel.width, left, right, result, None, self._limit(Dimension.COLUMNS)).write()
        for visit in range(kernel.last_visit + 1):
            self._visit(visit)
        for index in range(len(kernel.readers)):
            self._read(index)
        if kernel.written:
            with each(constant(0), constant(self.count), 1) as row:
                self._write_numbers(_Row(self, row))

    def _write_numbers(self, row: _Row) -> None:
        """Write the numbers of a row that are read outside."""
        writer = self.writer
        for n, memory in zip(writer.kernel.written, writer.results[len(writer.kernel.readers) :], strict=True):
            shape, value = n.type.shape, row.number(n)
            if value.type != memory.type.element_type:
                value = arith.extui(memory.type.element_type, value)
            memref.store(value, memory, [row.place(range(len(shape)), shape, shape[:-1])])

    def _side(self, operand: Operand, outer: str, summand: str) -> Side:
        """An operand of a product, from the first row and the first column on."""
        b, r, c = (ir.AffineExpr.get_dim(i) for i in range(3))
        strides = operand.strides
        beyond = b * strides.get("b", 0) + r * strides.get("r", 0)
        beyond = beyond + c * (strides["n"] // operand.block if operand.block else strides.get("c", 0))
        first = number(beyond, self.writer.matrix, self.first, self.column)
        return Side(self.writer.read[operand.value], first, strides[outer], strides[summand], operand.block)

    def _limit(self, dimension: Dimension) -> Limit | None:
        """The limit of a product's dimension that is the columns of scores."""
        return None if self.end is None else Limit(dimension, self.end, UNIT)

    def _read(self, index: int) -> None:
        """Write code that computes a product of the scores of a group of rows."""
        writer, kernel = self.writer, self.writer.kernel
        reader, memory = kernel.readers[index], writer.results[index]
        scores = writer.scores[kernel.buffers[reader.of.scores]]
        strides = strides_of(reader.of.result, reader.of.operation.results[0].type.shape)
        p, b, r = (ir.AffineExpr.get_dim(i) for i in range(3))
        if not reader.of.sums_rows:
            left = Side(scores, constant(0), kernel.stride)
            right = self._side(reader.other, "c", "d")
            at = number(p * strides["b"] + b * strides["r"], writer.matrix, self.first)
            adds = None
            if kernel.block < kernel.region.sizes.columns:
                adds = arith.cmpi(arith.CmpIPredicate.ne, self.column, constant(0))
            result = Side(memory, at, strides["r"])
            limit = self._limit(Dimension.SUMMANDS)
            ProductCode(self.count, reader.size, kernel.block, kernel.width, left, right, result, adds, limit).write()
            return
        of_part = kernel.region.sizes.batch * strides["b"]
        at = number(p * of_part + b * strides["b"] + r * strides["c"], writer.part, writer.matrix, self.column)
        other = self._side(reader.other, "r", "d")
        if reader.of.result == "bcd":
            sizes, limit = (kernel.block, reader.size), self._limit(Dimension.ROWS)
            left, right = Side(scores, constant(0), 1, kernel.stride), other
        else:
            sizes, limit = (reader.size, kernel.block), self._limit(Dimension.COLUMNS)
            left = Side(other.memory, other.first, other.summand, other.outer)
            right = Side(scores, constant(0), kernel.stride)
        result = Side(memory, at, strides[reader.of.result[1]])
        ProductCode(*sizes, self.count, kernel.width, left, right, result, self.is_later, limit).write()

    def _visit(self, visit: int) -> None:
        """Write code that computes what is known in a visit of all columns, for each row of a group."""
        kernel, numbers = self.writer.kernel, self.writer.numbers
        stored = [m for m in kernel.buffers if m not in kernel.products and kernel.visits[m] == visit]
        reductions = [n for n in kernel.reductions if kernel.visits[n] == visit + 1]
        if not stored and not reductions:
            return
        columns, width = kernel.block, kernel.width
        whole = columns // width * width
        at_once = next(n for n in _AT_ONCE if (columns if self.end is None else UNIT) // width % n == 0)
        kind = vector_of(width)
        with each(constant(0), constant(self.count), 1) as row:
            of_row = _Row(self, row)
            for value in (*stored, *reductions):
                of_row.prepare(value, visit)
            begun = [_splat(begins_with(n.owner), kind) for n in reductions]

            def add(column: Any, totals: list[Any]) -> list[Any]:
                points = [_Point(of_row, visit, column, i * width, Lanes(kind)) for i in range(at_once)]
                values = self._store(points, stored, reductions)
                return [_combined(n, v, t) for n, v, t in zip(reductions * at_once, values, totals, strict=True)]

            end = constant(whole) if self.end is None else self.end
            totals = loop(constant(0), end, width * at_once, begun * at_once, add)
            last = _Point(of_row, visit, constant(whole), 0, Lanes(kind).first(columns - whole))
            rest = self._store([last], stored, reductions) if columns > whole else []
            for i, n in enumerate(reductions):
                parts = totals[i :: len(reductions)]
                parts += [arith.select(last.lanes.mask, value, begun[i]) for value in rest[i : i + 1]]
                total = reduce(partial(_combined, n), parts)
                memref.store(_folded(n, total), numbers[kernel.reductions.index(n)], [row])

    def _store(self, points: Sequence[_Point], matrices: Sequence[Any], reductions: Sequence[Any]) -> list[Any]:
        """Write code that computes vectors of what is reduced and stored, and then stores them; return the former.

        What is stored may take the memory of what the others are computed from.
        """
        reduced = [p.value(self.writer.kernel.region.inputs(n)[0].inside) for p in points for n in reductions]
        values = [[p.value(m) for m in matrices] for p in points]
        for point, of_point in zip(points, values, strict=True):
            for matrix, value in zip(matrices, of_point, strict=True):
                memory = self.writer.scores[self.writer.kernel.buffers[matrix]]
                point.lanes.store(_kept(value), memory, point.in_scores)
        return reduced


@dataclass(frozen=True, eq=False)
class _Row:
    """A row of a group.

    Attributes:
        group: the group.
        row: the number of the row in the group.
        known: the numbers that are there.
        reciprocals: the factors of the reciprocals that are there, by number.
    """

    group: _Group
    row: Any
    known: dict[Any, Any] = field(default_factory=dict)
    reciprocals: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def prepare(self, value: Any, visit: int) -> None:
        """Write code for all of the row that a visit needs to compute a matrix, or to reduce one."""
        kernel = self.group.writer.kernel
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
        kernel = self.group.writer.kernel
        if value in kernel.reductions:
            return memref.load(self.group.writer.numbers[kernel.reductions.index(value)], [self.row])
        given = [self.input(i, value.type.shape[:-1]) for i in kernel.region.inputs(value)]
        return computed(value.owner, given, None)

    def input(self, one: Input, batch: Sequence[int]) -> Any:
        """A number of an input that is the same for all columns; `batch` are the sizes of the loops over the batch."""
        if one.inside is not None:
            return self.number(one.inside)
        key = one.value, *one.loops
        if key not in self.known:
            kind = one.value.type
            loaded = memref.load(self.group.writer.read[one.value], [self.place(one.loops, kind.shape, batch)])
            is_bit = loaded.type != kind.element_type
            self.known[key] = arith.trunci(kind.element_type, loaded) if is_bit else loaded
        return self.known[key]

    def factors(self, divisor: Any) -> tuple[Any, Any]:
        """Two factors whose product is the reciprocal of a number.

        The first one is a power of two. With it, the second is neither infinite nor denormal.
        """
        if divisor not in self.reciprocals:
            one, small, large = (_splat(x, divisor.type) for x in (1.0, 2.0**-64, 2.0**64))
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
            batch: the sizes of the dimensions that together are the batch.
            column: the column; None for the first one.
        """
        b, f, r, c = (ir.AffineExpr.get_dim(i) for i in range(4))
        of_batch = [ir.AffineExpr.get_floor_div(b, math.prod(batch[i + 1 :])) % size for i, size in enumerate(batch)]
        indices = [*of_batch, f + r, c]
        expression = fixed(0)
        for i, d in enumerate(loops):
            expression = expression + indices[d] * math.prod(shape[i + 1 :])
        column = constant(0) if column is None else column
        return number(expression, self.group.writer.matrix, self.group.first, self.row, column)


@dataclass(frozen=True, eq=False)
class _Point:
    """A vector of columns of a row.

    Attributes:
        row: the row.
        visit: the number of the visit.
        column: the first column, without `beyond`.
        beyond: so many columns behind it.
        lanes: how the vector is read.
        known: the vectors that are there, by matrix.
    """

    row: _Row
    visit: int
    column: Any
    beyond: int
    lanes: Lanes
    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def in_scores(self) -> Any:
        """The index of the vector in the memory of a matrix."""
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        return number(r * self.row.group.writer.kernel.stride + c + self.beyond, self.row.row, self.column)

    def value(self, matrix: Any) -> Any:
        """The vector of a matrix."""
        if matrix not in self.known:
            self.known[matrix] = self._computed(matrix)
        return self.known[matrix]

    def _computed(self, matrix: Any) -> Any:
        kernel = self.row.group.writer.kernel
        if kernel.is_stored(matrix, self.visit):
            memory = self.row.group.writer.scores[kernel.buffers[matrix]]
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
        kernel, batch = self.row.group.writer.kernel, matrix.type.shape[:-2]
        kind = ir.VectorType.get([kernel.width], one.value.type.element_type)
        if _is_of_rows(one, matrix):
            return vector.broadcast(kind, self.row.input(one, batch))
        if one.inside is not None:
            return self.value(one.inside)
        memory = self.row.group.writer.read[one.value]
        of_memory = ir.VectorType.get([kernel.width], memory.type.element_type)
        c, f = (ir.AffineExpr.get_dim(i) for i in range(2))
        column = number(c + f + self.beyond, self.column, self.row.group.column)
        place = self.row.place(one.loops, one.value.type.shape, batch, column)
        loaded = Lanes(of_memory, self.lanes.mask).load(memory, place)
        return loaded if of_memory == kind else arith.trunci(kind, loaded)


def _is_of_rows(one: Input, matrix: Any) -> bool:
    """Whether an input of a matrix is the same for all columns."""
    return len(matrix.type.shape) - 1 not in one.loops


def _quotient(inputs: Sequence[Input], matrix: Any) -> tuple[Input, Input] | None:
    """The two inputs of a division by a number of the row; None if a matrix is computed by anything else."""
    places = quotient_of(matrix)
    if places is None or not _is_of_rows(inputs[places[1]], matrix):
        return None
    return inputs[places[0]], inputs[places[1]]


def _splat(value: float | None, kind: ir.Type) -> Any:
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


def _combined(reduction: Any, one: Any, other: Any) -> Any:
    """What a reduction makes of two numbers, or of two vectors."""
    return ir.Operation.create(combiner_of(reduction.owner), [one.type], [one, other]).result


def _folded(reduction: Any, values: Any) -> Any:
    """What a reduction makes of all elements of a vector."""
    size = values.type.shape[0]
    while size > 1:
        size //= 2
        halves = [_part(values, first, size) for first in (0, size)]
        values = _combined(reduction, *halves)
    return vector.extract(values, [], [0])


def _part(values: Any, first: int, size: int) -> Any:
    numbers = {"offsets": [first], "sizes": [size], "strides": [1]}
    number = ir.IntegerType.get_signless(64)
    attributes = {n: ir.ArrayAttr.get([ir.IntegerAttr.get(number, x) for x in v]) for n, v in numbers.items()}
    return ir.Operation.create("vector.extract_strided_slice", [vector_of(size)], [values], attributes).result
