"""Write the code of attention: a thread computes the scores of a group of rows, and all that is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, scf, vector

from irongrad.mlir.loop_code import (
    Lanes,
    PartsOf,
    constant,
    each,
    fixed,
    least,
    loop,
    new_executable,
    number,
    vector_of,
)
from irongrad.passes.module.attention_kernels.hidden import UNIT
from irongrad.passes.module.attention_kernels.kernel import AttentionKernel, Operand, strides_of
from irongrad.passes.module.attention_kernels.memory import Memory
from irongrad.passes.module.attention_kernels.product_code import Dimension, Limit, ProductCode, Side
from irongrad.passes.module.attention_kernels.row_code import Point, Row, splat
from irongrad.passes.module.attention_kernels.values import begins_with, combiner_of

# How many vectors of a row are computed at once, if they divide it: their chains of operations overlap.
_AT_ONCE = (4, 3, 2, 1)


def executable_of(kernel: AttentionKernel, name: str) -> Any:
    """A kernel as an operation `stream.executable`, with one entry point; both are called `name`."""
    batch = kernel.region.sizes.batch
    counts = kernel.parts, PartsOf(1) if batch is None else batch, 1
    tensors, made = len(kernel.read) + kernel.hides + len(kernel.made), len(kernel.made)
    of_launch = new_executable(name, counts, tensors, kernel.operations, sizes=int(batch is None), results=made)
    with of_launch as (executable, bindings):
        memory = Memory.of(kernel, bindings)
        with each(constant(0), constant(kernel.region.sizes.columns), kernel.block) as column:
            _write_block(memory, column)
    return executable


def _write_block(memory: Memory, column: Any) -> None:
    """Write the code of the columns that begin at `column`: the last rows, which see the most columns, first."""
    rows, groups, larger = memory.kernel.group
    d, e = (ir.AffineExpr.get_dim(i) for i in range(2))
    of_part = memory.kernel.groups_of_part
    begin = number(d * of_part, memory.part)
    end = least([d + of_part, fixed(groups)], begin)
    with each(begin, end, 1) as index:
        group = number(e - 1 - d, number(d - e, index, begin), end)
        is_later = arith.cmpi(arith.CmpIPredicate.ne, index, begin)
        if not larger:
            _write_group(memory, column, number(d * rows, group), rows, is_later)
            return
        is_larger = arith.cmpi(arith.CmpIPredicate.ult, group, constant(larger))
        branches = scf.IfOp(is_larger, has_else=True)
        for block, first, count in (
            (branches.then_block, d * (rows + 1), rows + 1),
            (branches.else_block, d * rows + larger, rows),
        ):
            with ir.InsertionPoint(block):
                _write_group(memory, column, number(first, group), count, is_later)
                scf.yield_([])


def _write_group(memory: Memory, column: Any, first: Any, count: int, is_later: Any) -> None:
    """Write the code of a group of `count` rows that begins at the row `first`."""
    kernel, columns = memory.kernel, memory.kernel.region.sizes.columns
    if memory.seen is None:
        _Group(memory, column, first, count, is_later).write()
        return
    f, c = (ir.AffineExpr.get_dim(i) for i in range(2))
    seen = least([f + c + count - 1, fixed(columns)], first, memory.seen)
    if kernel.sums_rows:  # the first group writes the sums of all columns
        seen = arith.select(is_later, seen, constant(columns))
    units = number(ir.AffineExpr.get_ceil_div(f - c, UNIT) * UNIT, seen, column)
    end = least([f, fixed(kernel.block)], units)
    with ir.InsertionPoint(scf.IfOp(arith.cmpi(arith.CmpIPredicate.sgt, end, constant(0))).then_block):
        _Group(memory, column, first, count, is_later, end).write()
        scf.yield_([])


@dataclass(frozen=True, eq=False)
class _Group:
    """A group of rows, and a block of columns.

    Attributes:
        memory: the memory of the kernel.
        column: the first column of the block.
        first: the first row of the group.
        count: the number of rows.
        is_later: whether the part has had a group before.
        end: how many columns of the block count, a multiple of `UNIT`; None if all do.
    """

    memory: Memory
    column: Any
    first: Any
    count: int
    is_later: Any
    end: Any = None

    def write(self) -> None:
        """Write the code of the group."""
        memory, kernel = self.memory, self.memory.kernel
        for matrix, product in kernel.products.items():
            left = self._side(product.left, "r", "d")
            right = self._side(product.right, "d", "c")
            result = Side(memory.scores[kernel.buffers[matrix]], constant(0), kernel.stride)
            sizes = self.count, kernel.block, product.summands
            ProductCode(*sizes, kernel.width, left, right, result, None, self._limit(Dimension.COLUMNS)).write()
        for visit in range(kernel.last_visit + 1):
            self._visit(visit)
        for index in range(len(kernel.readers)):
            self._read(index)
        if kernel.written:
            with each(constant(0), constant(self.count), 1) as row:
                self._write_numbers(Row(memory, self.first, self.column, row))

    def _write_numbers(self, row: Row) -> None:
        """Write the numbers of a row that are read outside."""
        kernel = self.memory.kernel
        for n, result in zip(kernel.written, self.memory.results[len(kernel.readers) :], strict=True):
            shape, value = n.type.shape, row.number(n)
            if value.type != result.type.element_type:
                value = arith.extui(result.type.element_type, value)
            memref.store(value, result, [row.place(range(len(shape)), shape, shape[:-1])])

    def _side(self, operand: Operand, outer: str, summand: str) -> Side:
        """An operand of a product, from the first row and the first column on."""
        b, r, c = (ir.AffineExpr.get_dim(i) for i in range(3))
        strides = operand.strides
        beyond = b * strides.get("b", 0) + r * strides.get("r", 0)
        beyond = beyond + c * (strides["n"] // operand.block if operand.block else strides.get("c", 0))
        first = number(beyond, self.memory.matrix, self.first, self.column)
        return Side(self.memory.read[operand.value], first, strides[outer], strides[summand], operand.block)

    def _limit(self, dimension: Dimension) -> Limit | None:
        """The limit of a product's dimension that is the columns of scores."""
        return None if self.end is None else Limit(dimension, self.end, UNIT)

    def _read(self, index: int) -> None:
        """Write code that computes a product of the scores of a group of rows."""
        memory, kernel = self.memory, self.memory.kernel
        reader, made = kernel.readers[index], memory.results[index]
        scores = memory.scores[kernel.buffers[reader.of.scores]]
        strides = strides_of(reader.letters, reader.shape)
        p, b, r = (ir.AffineExpr.get_dim(i) for i in range(3))
        if not reader.of.sums_rows:
            left = Side(scores, constant(0), kernel.stride)
            right = self._side(reader.other, "c", "d")
            at = number(p * strides["b"] + b * strides["r"], memory.matrix, self.first)
            adds = None
            if kernel.block < kernel.region.sizes.columns:
                adds = arith.cmpi(arith.CmpIPredicate.ne, self.column, constant(0))
            result = Side(made, at, strides["r"])
            limit = self._limit(Dimension.SUMMANDS)
            ProductCode(self.count, reader.size, kernel.block, kernel.width, left, right, result, adds, limit).write()
            return
        of_part = (kernel.region.sizes.batch or 0) * strides["b"]  # any number of matrices has one part
        at = number(p * of_part + b * strides["b"] + r * strides["c"], memory.part, memory.matrix, self.column)
        other = self._side(reader.other, "r", "d")
        if reader.of.result == "bcd":
            sizes, limit = (kernel.block, reader.size), self._limit(Dimension.ROWS)
            left, right = Side(scores, constant(0), 1, kernel.stride), other
        else:
            sizes, limit = (reader.size, kernel.block), self._limit(Dimension.COLUMNS)
            left = Side(other.memory, other.first, other.summand, other.outer)
            right = Side(scores, constant(0), kernel.stride)
        result = Side(made, at, strides[reader.of.result[1]])
        ProductCode(*sizes, self.count, kernel.width, left, right, result, self.is_later, limit).write()

    def _visit(self, visit: int) -> None:
        """Write code that computes what is known in a visit of all columns, for each row of a group."""
        kernel, numbers = self.memory.kernel, self.memory.numbers
        stored = [m for m in kernel.buffers if m not in kernel.products and kernel.visits[m] == visit]
        reductions = [n for n in kernel.reductions if kernel.visits[n] == visit + 1]
        if not stored and not reductions:
            return
        columns, width = kernel.block, kernel.width
        whole = columns // width * width
        at_once = next(n for n in _AT_ONCE if (columns if self.end is None else UNIT) // width % n == 0)
        kind = vector_of(width)
        with each(constant(0), constant(self.count), 1) as row:
            of_row = Row(self.memory, self.first, self.column, row)
            for value in (*stored, *reductions):
                of_row.prepare(value, visit)
            begun = [splat(begins_with(n.owner), kind) for n in reductions]

            def add(column: Any, totals: list[Any]) -> list[Any]:
                points = [Point(of_row, visit, column, i * width, Lanes(kind)) for i in range(at_once)]
                values = self._store(points, stored, reductions)
                return [_combined(n, v, t) for n, v, t in zip(reductions * at_once, values, totals, strict=True)]

            end = constant(whole) if self.end is None else self.end
            totals = loop(constant(0), end, width * at_once, begun * at_once, add)
            last = Point(of_row, visit, constant(whole), 0, Lanes(kind).first(columns - whole))
            rest = self._store([last], stored, reductions) if columns > whole else []
            for i, n in enumerate(reductions):
                parts = totals[i :: len(reductions)]
                parts += [arith.select(last.lanes.mask, value, begun[i]) for value in rest[i : i + 1]]
                total = reduce(partial(_combined, n), parts)
                memref.store(_folded(n, total), numbers[kernel.reductions.index(n)], [row])

    def _store(self, points: Sequence[Point], matrices: Sequence[Any], reductions: Sequence[Any]) -> list[Any]:
        """Write code that computes vectors of what is reduced and stored, and then stores them; return the former.

        What is stored may take the memory of what the others are computed from.
        """
        reduced = [p.value(self.memory.kernel.region.inputs(n)[0].inside) for p in points for n in reductions]
        values = [[p.value(m) for m in matrices] for p in points]
        for point, of_point in zip(points, values, strict=True):
            for matrix, value in zip(matrices, of_point, strict=True):
                point.store(matrix, value)
        return reduced


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
