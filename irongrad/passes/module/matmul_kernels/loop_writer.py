"""Write the code of a loop over time steps: one thread runs all steps for some of the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress, groupby
from math import prod
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import arith, hal, memref, scf, vector

from irongrad.mlir.linalg import inputs_of
from irongrad.mlir.loop_code import (
    Lanes,
    PartsOf,
    computed,
    constant,
    each,
    new_executable,
    number,
    row_of,
    smaller,
    widened,
)
from irongrad.passes.module.matmul_kernels import amx
from irongrad.passes.module.matmul_kernels.loop_body import slice_of, unmarked
from irongrad.passes.module.matmul_kernels.loop_kernel import LoopKernel, LoopProduct, Store
from irongrad.passes.module.matmul_kernels.loop_steps import Step
from irongrad.passes.module.matmul_kernels.loop_tiles import pairs_of, tile_of
from irongrad.passes.module.matmul_kernels.pair_code import PairCode, room
from irongrad.passes.module.matmul_kernels.places import Memory, Place, first_column
from irongrad.passes.module.matmul_kernels.tiling import MatmulShape, Matrix, ProductKernel, Strides
from irongrad.passes.module.matmul_kernels.vector_code import write_strips


def executable_of(kernel: LoopKernel, name: str) -> Any:
    """A kernel as an operation `stream.executable`, with one entry point; both are called `name`."""
    made, known = len(kernel.made), kernel.strips // kernel.together
    of_any = PartsOf(kernel.division[0] * kernel.together, kernel.sizes - 1)
    counts = known if kernel.body.batch is not None else of_any, 1, 1
    of_launch = new_executable(name, counts, kernel.tensors, kernel.operations, sizes=kernel.sizes, results=made)
    with of_launch as (executable, arguments):
        behind = len(arguments) - made
        sizes = [arguments.pop(behind - kernel.sizes) for _ in range(kernel.sizes)]
        _Writer.of(kernel, arguments, _Sizes.of(kernel, sizes)).write()
    return executable


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a loop.

    Attributes:
        trips: the number of iterations, as an index.
        batch: the number of rows, as an index if a launch gives it; else None.
    """

    trips: Any
    batch: Any | None

    @classmethod
    def of(cls, kernel: LoopKernel, given: Sequence[Any]) -> Self:
        """The sizes of a kernel, some of which a launch gives."""
        trips, batch = kernel.body.trips, kernel.body.batch
        return cls(given[0] if trips is None else constant(trips), given[-1] if batch is None else None)

    def row_of(self, binding: Any, kind: Any) -> Any:
        """The memory of a tensor as a memref of rank 1. Unknown sizes are those of a stack (steps, rows, columns)."""
        elements = prod(kind.shape) if kind.has_static_shape else self._elements(kind)
        return row_of(binding, elements, kind.element_type)

    def _elements(self, kind: Any) -> Any:
        unknown = [kind.is_dynamic_dim(d) for d in range(kind.rank)]
        known = constant(prod(size for size, is_unknown in zip(kind.shape, unknown, strict=True) if not is_unknown))
        sizes = (self.batch, None) if kind.rank == 2 else (self.trips, self.batch, None)
        return reduce(arith.muli, compress(sizes, unknown), known)


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes the code of one workgroup.

    Attributes:
        kernel: the kernel.
        read: the memory of each value that is read, by value.
        first: the memory of the initial values, in the order of the carried values.
        rights: the memory of the right operands, in the order of the products.
        results: the memory of products, in their order.
        written: the memory of stacks, carried values and left operands, by `Store.buffer`.
        sizes: the numbers of iterations and rows.
    """

    kernel: LoopKernel
    read: dict[Any, Any]
    first: Sequence[Any]
    rights: Sequence[Any]
    results: Sequence[Any]
    written: dict[Any, Any]
    sizes: _Sizes

    @classmethod
    def of(cls, kernel: LoopKernel, bindings: Sequence[Any], sizes: _Sizes) -> _Writer:
        """A writer for a function with the arguments `bindings`."""
        body, given, behind = kernel.body, len(kernel.read), len(kernel.read) + len(kernel.products)
        read = [sizes.row_of(b, v.type) for b, v in zip(bindings[:given], kernel.read, strict=True)]
        rights = [
            row_of(b, p.layout.elements, p.right.type.element_type)
            for b, p in zip(bindings[given:behind], kernel.products, strict=True)
        ]
        made = [sizes.row_of(b, kind) for b, kind in zip(bindings[behind:], kernel.made, strict=True)]
        results, working = made[: len(body.loop.results)], made[len(body.loop.results) :]
        lefts = [p for p in kernel.products if kernel.carried_left(p) is None]
        written: dict[Any, Any] = {s: results[s.place] for s in body.stacks}
        written |= {c: results[c.place] for c in body.carries}
        written |= dict(zip(lefts, working[len(kernel.products) :], strict=True))
        first = read[: len(body.carries)]
        values = dict(zip(kernel.read[len(body.carries) :], read[len(body.carries) :], strict=True))
        return cls(kernel, values, first, rights, working[: len(kernel.products)], written, sizes)

    def write(self) -> None:
        """Write the code at the current insertion point: for strips of one size, or of two that differ by a row."""
        d, strip = ir.AffineExpr.get_dim(0), hal.interface_workgroup_id(0)
        rows, larger = self.kernel.division
        if not larger:
            of_thread = self._rows(number(d * (rows * self.kernel.together), strip), rows)
            write = self._write_strips if self.sizes.batch is None else self._write_existing
            write(of_thread, rows)
            return
        is_larger = arith.cmpi(arith.CmpIPredicate.ult, strip, constant(larger))
        branches = scf.IfOp(is_larger, has_else=True)
        with ir.InsertionPoint(branches.then_block):
            self._write_strips(self._rows(number(d * (rows + 1), strip), rows + 1), rows + 1)
            scf.yield_([])
        with ir.InsertionPoint(branches.else_block):
            self._write_strips(self._rows(number(d * rows + larger, strip), rows), rows)
            scf.yield_([])

    def _write_existing(self, rows: tuple[Any, Any], count: int) -> None:
        """Write the code of those rows that the batch has: of strips of `count` rows, and of one row for the rest."""
        first, end = rows[0], smaller(rows[1], self.sizes.batch)
        begin, behind = (ir.AffineExpr.get_dim(i) for i in range(2))
        rest = number(behind - (behind - begin) % count, first, end)
        self._write_strips((first, rest), count)
        if count > 1:
            self._write_strips((rest, end), 1)

    def _rows(self, first: Any, count: int) -> tuple[Any, Any]:
        """The first row, and the first behind all strips of `count` rows that a thread computes together."""
        return first, number(ir.AffineExpr.get_dim(0) + count * self.kernel.together, first)

    def _write_strips(self, rows: tuple[Any, Any], count: int) -> None:
        """Write the code of whole strips of `count` rows; `rows` are the first, and the first behind them."""
        kernel, body = self.kernel, self.kernel.body
        for carry, memory in zip(body.carries, self.first, strict=True):
            self._copy(memory, self.written[carry], carry.piece.columns, rows)
        strips = _Strips.begin(kernel, rows, count)
        last = max(s.stage for s in kernel.stores)
        with each(constant(0), self.sizes.trips, 1) as iteration:
            for stage in range(last + 1):
                stores = [s for s in kernel.stores if s.stage == stage]
                for columns, group in groupby(stores, key=lambda s: s.piece.columns):
                    self._store(list(group), columns, iteration, rows)
                for index, product in enumerate(kernel.products):
                    if kernel.after[product] == stage < last:
                        self._multiply(index, product, strips)
        if strips.has_tiles is not None:
            amx.release(strips.has_tiles)

    def _each(self, rows: tuple[Any, Any], columns: int, write: Callable[[Any, Any, Lanes], None]) -> None:
        """Write code for each vector of some rows of `columns` numbers; `write` gets its row, first column and lanes.

        The last vector of a row is a part of one if the columns are no whole vectors.
        """
        width = self.kernel.width
        whole = columns // width * width
        lanes = Lanes(ir.VectorType.get([width], ir.F32Type.get()))
        with each(*rows, 1) as row:
            if whole:
                with each(constant(0), constant(whole), width) as column:
                    write(row, column, lanes)
            if columns > whole:
                write(row, constant(whole), lanes.first(columns - whole))

    def _copy(self, source: Any, target: Any, columns: int, rows: tuple[Any, Any]) -> None:
        """Write code that copies rows of a matrix."""
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))

        def write(row: Any, column: Any, lanes: Lanes) -> None:
            place = number(r * columns + c, row, column)
            lanes.store(lanes.load(source, place), target, place)

        self._each(rows, columns, write)

    def _store(self, stores: Sequence[Store], columns: int, iteration: Any, rows: tuple[Any, Any]) -> None:
        """Write code that computes and stores pieces of equally many columns."""

        def write(row: Any, column: Any, lanes: Lanes) -> None:
            at = _Point(self, iteration, row, column, lanes)
            values = [at.value(s.piece.values, 0) for s in stores]
            for store, value in zip(stores, values, strict=True):
                place, memory = at.place(store.width, store.piece.column, store.step), self.written[store.buffer]
                kind = ir.VectorType.get([self.kernel.width], memory.type.element_type)
                lanes.store(widened(value, kind), memory, place)

        self._each(rows, columns, write)

    def _multiply(self, index: int, product: LoopProduct, strips: _Strips) -> None:
        """Write code that computes a product of the rows of a thread."""
        kernel, count = self.kernel, strips.count
        carried = kernel.carried_left(product)
        left = self.written[product if carried is None else kernel.body.carries[carried]]
        layout = Matrix(count * product.summands, 0, Strides(product.summands), Strides(1))
        sizes = MatmulShape(1, count, product.columns, product.summands)
        memory = Memory(left, self.rights[index], None, self.results[index])
        if product.is_in_pairs:
            tile = pairs_of(count, is_amx=kernel.has_amx)
            of_pairs = ProductKernel(sizes, tile, layout, product.layout, False, multiplies_halves=True, has_pairs=True)
            strips.multiply_pairs(of_pairs, memory)
        else:
            tile = tile_of(count, product.columns, kernel.width)
            pads = product.layout.elements > product.columns * product.summands
            of_product = ProductKernel(sizes, tile, layout, product.layout, False, pads_right=pads)
            write_strips(of_product, memory, strips.rows)


@dataclass(frozen=True)
class _Strips:
    """The rows of one workgroup, and what products of bfloat16 need in every iteration.

    Attributes:
        rows: the first row, and the first that is not one of them.
        count: the number of rows of a strip.
        sums: memory for the sums of a tile, float32; None without products of bfloat16.
        has_tiles: an i1, whether AMX multiplies; None in a kernel without AMX.
    """

    rows: tuple[Any, Any]
    count: int
    sums: Any | None = None
    has_tiles: Any | None = None

    @classmethod
    def begin(cls, kernel: LoopKernel, rows: tuple[Any, Any], count: int) -> Self:
        """Write what comes before the loop."""
        if not any(p.is_in_pairs for p in kernel.products):
            return cls(rows, count)
        tile = pairs_of(count, is_amx=kernel.has_amx)
        sums = room(count * tile.columns, ir.F32Type.get())
        return cls(rows, count, sums, amx.asked(tile) if tile.is_amx else None)

    def multiply_pairs(self, kernel: ProductKernel, memory: Memory) -> None:
        """Write code that computes a product of pairs of bfloat16."""
        code, zero = PairCode.of_loop(kernel, memory, self.sums, self.has_tiles), constant(0)
        with each(zero, constant(kernel.panels), 1) as panel, each(*self.rows, self.count) as row:
            code.write_tile(Place(zero, zero, row, panel, first_column(kernel, panel), zero))


@dataclass(frozen=True, eq=False)
class _Point:
    """The place of a vector in an iteration's values.

    Attributes:
        writer: the writer of the kernel.
        iteration: the number of the iteration.
        row: the row in the batch.
        column: the first column.
        lanes: how a vector is read.
        known: the vectors that are there, by value and offset.
    """

    writer: _Writer
    iteration: Any
    row: Any
    column: Any
    lanes: Lanes
    known: dict[tuple[Any, int], Any] = field(default_factory=dict)

    def place(self, width: int, offset: int, step: Step | None) -> Any:
        """The index of a vector in memory whose rows have `width` elements."""
        r, c, t, trips = (ir.AffineExpr.get_dim(i) for i in range(4))
        in_matrix = r * width + c + offset
        if step is None:
            return number(in_matrix, self.row, self.column)
        matrix = trips * step.of_trips + t * step.sign + step.first
        place, sizes = [self.row, self.column, self.iteration], self.writer.sizes
        place += [sizes.trips] if step.of_trips else []
        if (batch := self.writer.kernel.body.batch) is not None:
            return number(matrix * (batch * width) + in_matrix, *place)
        above = arith.muli(number(matrix, *place), sizes.batch)
        return number(t * width + in_matrix, self.row, self.column, above)

    def value(self, value: Any, offset: int) -> Any:
        """The vector of `value`, `offset` columns behind the place."""
        value = unmarked(value)
        key = (value, offset)
        if key not in self.known:
            self.known[key] = self._computed(value, offset)
        return self.known[key]

    def _computed(self, value: Any, offset: int) -> Any:
        writer, kernel = self.writer, self.writer.kernel
        if kernel.body.is_outside(value):
            return self._given(value, offset)
        if (row := kernel.body.row_of_stack(value)) is not None:
            stack, step, column = row
            return self._load(writer.read[stack], stack.type.shape[2], column + offset, step)
        if isinstance(value.owner, ir.Block):
            (carry,) = (c for c in kernel.body.carries if c.argument == value)
            return self._load(writer.written[carry], value.type.shape[1], offset)
        if value.owner in kernel.by_operation:
            return self._load(writer.results[kernel.by_operation[value.owner]], value.type.shape[1], offset)
        if (sliced := slice_of(value)) is not None:
            return self.value(sliced[0], sliced[1] + offset)
        return self._elementwise(value.owner, offset)

    def _given(self, value: Any, offset: int) -> Any:
        """A vector of a matrix, of a row or of a number from outside of the loop."""
        memory, shape = self.writer.read[value], value.type.shape
        if len(shape) == 2:
            return self._load(memory, shape[1], offset)
        if len(shape) == 1:
            return self.lanes.load(memory, number(ir.AffineExpr.get_dim(0) + offset, self.column))
        kind = ir.VectorType.get(self.lanes.kind.shape, value.type.element_type)
        return vector.broadcast(kind, memref.load(memory, [constant(0)]))

    def _load(self, memory: Any, width: int, offset: int, step: Step | None = None) -> Any:
        return self.lanes.load(memory, self.place(width, offset, step))

    def _elementwise(self, operation: Any, offset: int) -> Any:
        """The vector that the code of a `linalg.generic` computes."""
        inputs = [self.value(i, offset) for i in inputs_of(operation)]
        return computed(operation, inputs, self.writer.kernel.width)
