"""The code of a product of bfloat16: it multiplies pairs of summands, and adds both products to a sum of float32.

Each thread copies a block of the right operand into pairs: for two rows of the operand, the two numbers of each column
lie side by side. Either AMX or VDPBF16PS of AVX-512 multiplies a strip of the left operand by the block. The sums stay
in memory of the thread until the last block is added. The thread then adds the row, rounds, and writes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref, scf, vector

from irongrad.memory_model.product_tiles import AMX_SUMMANDS
from irongrad.mlir.loop_code import constant, each, fixed, least, loop, number, vector_of, zeros
from irongrad.passes.module.matmul_kernels import amx
from irongrad.passes.module.matmul_kernels.places import Memory, Place, existing, left_rows
from irongrad.passes.module.matmul_kernels.squares import transposed
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel

# Bytes of a number of an operand, and of a sum.
_HALF, _SUM = 2, 4

# The most rows of results in vector registers, two vectors each, where AMX has larger tiles.
_ROWS = 8


@dataclass(frozen=True)
class PairCode:
    """The code of one workgroup.

    Attributes:
        kernel: the kernel.
        memory: its buffers.
        block: the block of the right operand, bfloat16: for each pair of summands, the pairs of the tile's columns.
        sums: the sums of one panel, float32: tile after tile, row by row.
        rest: the last summands of a strip, bfloat16, that fill no register of AMX: a register's row for each row; None
            if all registers are full.
        has_tiles: an i1, whether AMX multiplies; None in a kernel without AMX.
    """

    kernel: ProductKernel
    memory: Memory
    block: Any
    sums: Any
    rest: Any | None
    has_tiles: Any | None

    @classmethod
    def begin(cls, kernel: ProductKernel, memory: Memory) -> Self:
        """Write what comes before the first tile."""
        tile = kernel.tile
        return cls(
            kernel,
            memory,
            block=_room(kernel.depth * tile.columns, ir.BF16Type.get()),
            sums=_room(kernel.kept_strips * tile.rows * tile.columns, ir.F32Type.get()),
            rest=_room(tile.rows * AMX_SUMMANDS, ir.BF16Type.get()) if tile.is_amx and kernel.rest else None,
            has_tiles=amx.asked() if tile.is_amx else None,
        )

    def end(self) -> None:
        """Write what comes after the last tile."""
        if self.has_tiles is not None:
            with ir.InsertionPoint(scf.IfOp(self.has_tiles).then_block):
                amx.release()
                scf.yield_([])

    def write_block(self, batch: Any, column: Any, first: Any) -> None:
        """Write code that copies the block of the columns from `column` on, which begins at the summand `first`."""
        end = self._end(first)
        if self.kernel.right.outer.one == 1:
            self._interleave_rows(batch, column, first, end)
        else:
            self._turn_squares(batch, column, first, end)

    def _interleave_rows(self, batch: Any, column: Any, first: Any, end: Any) -> None:
        """Copy a block of which columns are neighbours in memory; registers of AMX are filled up with zeros."""
        tile, right = self.kernel.tile, self.kernel.right
        columns, width = tile.columns, tile.columns if right.outer.width is None else tile.width
        b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        with each(first, end, 2) as summand:
            for beyond in range(0, columns, width):
                begin = b * right.batch + right.outer.to(c + beyond)
                offsets = [number(begin + right.summand.to(k + step), batch, column, summand) for step in range(2)]
                rows = [vector.load(_halves(width), self.memory.right, [offset]) for offset in offsets]
                place = number(b + 2 * beyond, self._row(first, summand))
                vector.store(vector.interleave(*rows), self.block, [place])
        if self.rest is not None:
            whole = number(ir.AffineExpr.get_ceil_div(b, AMX_SUMMANDS) * AMX_SUMMANDS, end)
            with each(end, whole, 2) as summand:
                vector.store(zeros(_halves(2 * columns)), self.block, [self._row(first, summand)])

    def _turn_squares(self, batch: Any, column: Any, first: Any, end: Any) -> None:
        """Copy a block of which summands are neighbours in memory, in squares of as many pairs as columns."""
        tile, right = self.kernel.tile, self.kernel.right
        b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        pairs = ir.VectorType.get([tile.width], _integer())
        with (
            each(first, end, 2 * tile.width) as summand,
            each(constant(0), constant(tile.columns), tile.width) as beyond,
        ):
            start = number(b + c, column, beyond)
            offsets = (b * right.batch + right.outer.to(c + i) + k for i in range(tile.width))
            rows = [self._loaded(self.memory.right, number(o, batch, start, summand), summand) for o in offsets]
            for i, square in enumerate(transposed([vector.bitcast(pairs, row) for row in rows])):
                place = number(b + 2 * i * tile.columns + 2 * c, self._row(first, summand), beyond)
                vector.store(vector.bitcast(_halves(2 * tile.width), square), self.block, [place])

    def _loaded(self, memory: Any, offset: Any, summand: Any) -> Any:
        """A register of summands, the first of which is `summand`; zeros beyond the last one, which are not read."""
        kind = _halves(AMX_SUMMANDS)
        if not self.kernel.rest:
            return vector.load(kind, memory, [offset])
        left = number(fixed(self.kernel.sizes.summands) - ir.AffineExpr.get_dim(0), summand)
        mask = vector.create_mask(ir.VectorType.get([AMX_SUMMANDS], ir.IntegerType.get_signless(1)), [left])
        return vector.maskedload(kind, memory, [offset], mask, zeros(kind))

    def _row(self, first: Any, summand: Any) -> Any:
        """The place of a row of pairs in the block that begins at the summand `first`."""
        f, k = (ir.AffineExpr.get_dim(i) for i in range(2))
        return number((k - f) * self.kernel.tile.columns, first, summand)

    def write_tile(self, place: Place) -> None:
        """Write code that adds a block's product to the sums of a tile, and writes the result after the last block."""
        if self.has_tiles is None:
            self._add_vectors(place)
        else:
            either = scf.IfOp(self.has_tiles, has_else=True)
            with ir.InsertionPoint(either.then_block):
                self._add_tiles(place)
                scf.yield_([])
            with ir.InsertionPoint(either.else_block):
                self._add_vectors(place)
                scf.yield_([])
        with ExitStack() as stack:
            if self.kernel.blocks > 1:
                stack.enter_context(ir.InsertionPoint(scf.IfOp(self._is_last(place)).then_block))
                stack.callback(scf.yield_, [])
            self._write_results(place)

    def _add_tiles(self, place: Place) -> None:
        """Add the product by AMX."""
        left = self.kernel.left
        b, r, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        begin = number((b * left.batch + left.outer.to(r) + k) * _HALF, place.batch, place.row, place.summand)
        steps = number(ir.AffineExpr.get_floor_div(r - b, AMX_SUMMANDS), place.summand, self._end(place.summand))
        amx.add_product(
            self.kernel.tile,
            amx.Rows(
                amx.address(self.memory.left, begin),
                arith.constant(_wide(), left.outer.one * _HALF),
                arith.index_cast(_wide(), steps),
            ),
            amx.address(self.block),
            amx.address(self.sums, number(self._sum() * _SUM, place.strip)),
            self._is_first(place),
            None if self.rest is None else self._rest(place),
        )

    def _rest(self, place: Place) -> Any:
        """Copy the last summands of a strip, filled up with zeros; their address after the last block, else zero."""
        left = self.kernel.left
        b, r = (ir.AffineExpr.get_dim(i) for i in range(2))
        rows, first = self.kernel.tile.rows, self.kernel.sizes.summands - self.kernel.rest
        for i in range(rows):
            offset = number(b * left.batch + left.outer.to(r + i) + first, place.batch, place.row)
            row = self._loaded(self.memory.left, offset, constant(first))
            vector.store(row, self.rest, [constant(i * AMX_SUMMANDS)])
        begin = amx.address(self.rest)
        return (
            begin if self.kernel.blocks == 1 else arith.select(self._is_last(place), begin, arith.constant(_wide(), 0))
        )

    def _add_vectors(self, place: Place) -> None:
        """Add the product by VDPBF16PS, in as many rows at a time as registers hold."""
        tile = self.kernel.tile
        rows = min(tile.rows, _ROWS) if tile.is_amx else tile.rows
        with each(constant(0), constant(tile.rows), rows) as above:
            b, a = (ir.AffineExpr.get_dim(i) for i in range(2))
            places = [
                number(self._sum() + (a + i) * tile.columns + j * tile.width, place.strip, above)
                for i, j in product(range(rows), range(tile.vectors))
            ]
            kind = vector_of(tile.width)
            zero = zeros(kind)
            is_first = self._is_first(place)
            begun = [arith.select(is_first, zero, vector.load(kind, self.sums, [p])) for p in places]

            left = left_rows(self.kernel, place.batch, number(b + a, place.row, above), rows)
            sums = self._added(place.summand, left, begun)
            for total, p in zip(sums, places, strict=True):
                vector.store(total, self.sums, [p])

    def _added(self, begin: Any, rows: Sequence[Any], sums: list[Any]) -> list[Any]:
        """The sums after the block that begins at `begin` is added; `rows` is where rows begin on the left."""
        end, stretch, pairs = self._end(begin), self.kernel.stretch, self.kernel.left.summand.of_pairs
        if stretch is None:
            return self._add_stretch(begin, (begin, end), rows, sums)

        def add(first: Any, sums: list[Any]) -> list[Any]:
            f, r = (ir.AffineExpr.get_dim(i) for i in range(2))
            pair = ir.AffineExpr.get_floor_div(f, 2)
            of_rows = [number(r + pairs.to(pair) - pair * pairs.one, first, row) for row in rows]
            return self._add_stretch(begin, (first, number(f + stretch, first)), of_rows, sums)

        return loop(begin, end, stretch, sums, add)

    def _add_stretch(self, begin: Any, bounds: tuple[Any, Any], rows: Sequence[Any], sums: list[Any]) -> list[Any]:
        """The sums after the summands within `bounds` are added, between whose pairs the left operand has one stride.

        Args:
            begin: the first summand of the block.
            bounds: the first summand, and the first that is not added.
            rows: where the summand 0 of each row would be in the left operand with that stride.
            sums: the sums before.
        """
        tile, (r, k) = self.kernel.tile, (ir.AffineExpr.get_dim(i) for i in range(2))
        step = self.kernel.left.summand.of_pairs.one // 2

        def add(summand: Any, sums: list[Any]) -> list[Any]:
            right = [self._pairs(begin, summand, j) for j in range(tile.vectors)]
            left = [self._pair(number(r + k * step, row, summand)) for row in rows]
            return [
                _dot(sums[i * tile.vectors + j], x, y) for (i, x), (j, y) in product(enumerate(left), enumerate(right))
            ]

        return loop(*bounds, 2, sums, add)

    def _pairs(self, first: Any, summand: Any, j: int) -> Any:
        """The pairs of the block for vector `j` of a row of results."""
        f, k = (ir.AffineExpr.get_dim(i) for i in range(2))
        tile = self.kernel.tile
        return vector.load(
            _halves(2 * tile.width), self.block, [number((k - f) * tile.columns + 2 * tile.width * j, first, summand)]
        )

    def _pair(self, offset: Any) -> Any:
        """A pair of the left operand, as often as a vector has pairs."""
        width = self.kernel.tile.width
        pair = vector.load(_halves(2), self.memory.left, [offset])
        one = vector.extract(vector.bitcast(ir.VectorType.get([1], _integer()), pair), [], [0])
        every = vector.broadcast(ir.VectorType.get([width], _integer()), one)
        return vector.bitcast(_halves(2 * width), every)

    def _write_results(self, place: Place) -> None:
        """Write the rows of the result that are not in the strip before."""
        tile, (of_batch, of_row) = self.kernel.tile, self.kernel.result
        b, r, c, i = (ir.AffineExpr.get_dim(n) for n in range(4))
        kind = vector_of(tile.width)
        rows = [
            vector.load(kind, self.memory.row, [number(b + j * tile.width, place.column)])
            for j in range(tile.vectors if self.memory.row is not None else 0)
        ]
        with each(number(b * tile.rows - r, place.strip, place.row), constant(tile.rows), 1) as line:
            for j in range(tile.vectors):
                beyond = j * tile.width
                found = number(self._sum() + r * tile.columns + beyond, place.strip, line)
                value = vector.load(kind, self.sums, [found])
                if rows:
                    value = arith.addf(value, rows[j])
                if self.kernel.is_rounded:
                    value = arith.truncf(_halves(tile.width), value)
                offset = b * of_batch + (r + i) * of_row + c + beyond
                at = number(offset, place.batch, place.row, place.column, line)
                if self.kernel.pads_right:
                    vector.maskedstore(self.memory.result, [at], existing(self.kernel, place.column, beyond), value)
                else:
                    vector.store(value, self.memory.result, [at])

    def _sum(self) -> ir.AffineExpr:
        """The place of a tile's first sum, of the strip that the first dimension names."""
        tile = self.kernel.tile
        return (ir.AffineExpr.get_dim(0) % self.kernel.kept_strips) * (tile.rows * tile.columns)

    def _end(self, first: Any) -> Any:
        """The end of the block that begins at the summand `first`."""
        return least([ir.AffineExpr.get_dim(0) + self.kernel.depth, fixed(self.kernel.sizes.summands)], first)

    def _is_last(self, place: Place) -> Any:
        end = constant(self.kernel.sizes.summands)
        return arith.cmpi(arith.CmpIPredicate.eq, self._end(place.summand), end)

    def _is_first(self, place: Place) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, place.summand, constant(0))


def _room(elements: int, kind: ir.Type) -> Any:
    """Memory on the stack of the thread, as a memref of rank 1."""
    return memref.alloca(ir.MemRefType.get([elements], kind), [], [], alignment=amx.BYTES)


def _dot(sums: Any, left: Any, right: Any) -> Any:
    """The sums plus the dot products of pairs: VDPBF16PS."""
    return llvm.call_intrinsic(sums.type, "llvm.x86.avx512bf16.dpbf16ps.512", [sums, left, right], [], [])


def _halves(count: int) -> ir.VectorType:
    return ir.VectorType.get([count], ir.BF16Type.get())


def _integer() -> ir.Type:
    """The type of a pair as one number."""
    return ir.IntegerType.get_signless(32)


def _wide() -> ir.Type:
    return ir.IntegerType.get_signless(64)
