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
from irongrad.passes.module.matmul_kernels.places import Memory, Place, existing, first_column, first_row, left_rows
from irongrad.passes.module.matmul_kernels.squares import transposed
from irongrad.passes.module.matmul_kernels.strip_code import StripCode, halves
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel

# Bytes of a number of an operand, and of a sum.
_HALF, _SUM = 2, 4

# The most rows of results in vector registers, two vectors each, where AMX has larger tiles.
_ROWS = 8


def write_pairs(
    kernel: ProductKernel, memory: Memory, batch: Any, panels: tuple[Any, Any], strips: tuple[Any, Any]
) -> None:
    """Write the code of one workgroup.

    Args:
        kernel: the kernel.
        memory: its buffers.
        batch: the index of the matrices in the batch.
        panels: the bounds of the part's panels.
        strips: those of its strips.
    """
    code = PairCode.begin(kernel, memory)
    over_blocks, nowhere = each(constant(0), constant(kernel.sizes.summands), kernel.depth), constant(0)
    if kernel.copies_left:
        with over_blocks as summand:
            with each(*panels, 1) as panel:
                code.write_block(Place(batch, nowhere, nowhere, panel, first_column(kernel, panel), summand))
            with each(*strips, 1) as strip:
                row = first_row(kernel, strip)
                code.write_strip(Place(batch, strip, row, nowhere, nowhere, summand))
                with each(*panels, 1) as panel:
                    code.write_tile(Place(batch, strip, row, panel, first_column(kernel, panel), summand))
    else:
        with each(*panels, 1) as panel, over_blocks as summand:
            column = first_column(kernel, panel)
            code.write_block(Place(batch, nowhere, nowhere, panel, column, summand))
            with each(*strips, 1) as strip:
                code.write_tile(Place(batch, strip, first_row(kernel, strip), panel, column, summand))
    code.end()


@dataclass(frozen=True)
class PairCode:
    """The code of one workgroup.

    Attributes:
        kernel: the kernel.
        memory: its buffers.
        block: the block of the right operand, bfloat16: for each pair of summands, the pairs of the tile's columns.
        sums: the sums of one panel, float32: tile after tile, row by row.
        strips: how strips of the left operand are copied; None if the kernel reads them where they are.
        rest: the last summands of a strip, bfloat16, that fill no register of AMX: a register's row for each row; None
            if all registers are full, or strips are copied.
        has_tiles: an i1, whether AMX multiplies; None in a kernel without AMX.
    """

    kernel: ProductKernel
    memory: Memory
    block: Any
    sums: Any
    strips: StripCode | None
    rest: Any | None
    has_tiles: Any | None

    @classmethod
    def begin(cls, kernel: ProductKernel, memory: Memory) -> Self:
        """Write what comes before the first tile."""
        tile = kernel.tile
        has_rest = tile.is_amx and kernel.rest > 0 and not kernel.copies_left
        return cls(
            kernel,
            memory,
            block=room(kernel.copied_panels * _of_block(kernel), ir.BF16Type.get()),
            sums=room(kernel.kept_strips * kernel.kept_panels * tile.rows * tile.columns, ir.F32Type.get()),
            strips=StripCode.begin(kernel, memory.left) if kernel.copies_left else None,
            rest=room(tile.rows * AMX_SUMMANDS, ir.BF16Type.get()) if has_rest else None,
            has_tiles=amx.asked(tile) if tile.is_amx else None,
        )

    @classmethod
    def of_loop(cls, kernel: ProductKernel, memory: Memory, sums: Any, has_tiles: Any | None) -> Self:
        """The code of a product of one strip that is computed again and again; it `has_pairs`.

        Args:
            kernel: the product; it has the rows of the strip.
            memory: its buffers.
            sums: memory for the sums of a tile, float32.
            has_tiles: as above.
        """
        return cls(kernel, memory, memory.right, sums, None, None, has_tiles)

    def end(self) -> None:
        """Write what comes after the last tile."""
        if self.has_tiles is not None:
            amx.release(self.has_tiles)

    def write_block(self, place: Place) -> None:
        """Write code that copies the block of the right operand at `place`, of any strip."""
        if self.kernel.right.outer.one == 1:
            self._interleave_rows(place)
        else:
            self._turn_squares(place)

    def write_strip(self, place: Place) -> None:
        """Write code that copies the strip at `place`, if the kernel copies strips."""
        if self.strips is not None:
            self.strips.write(place, self._end(place.summand))

    def _interleave_rows(self, place: Place) -> None:
        """Copy a block of which columns are neighbours in memory; registers of AMX are filled up with zeros."""
        tile, right, end = self.kernel.tile, self.kernel.right, self._end(place.summand)
        columns, width = tile.columns, tile.columns if right.outer.width is None else tile.width
        b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        with each(place.summand, end, 2) as summand:
            for beyond in range(0, columns, width):
                begin = right.at(b, c + beyond)
                offsets = [
                    number(begin + right.summand.to(k + step), place.batch, place.column, summand) for step in range(2)
                ]
                rows = [vector.load(halves(width), self.memory.right, [offset]) for offset in offsets]
                to = number(b + 2 * beyond, self._row(place, summand))
                vector.store(vector.interleave(*rows), self.block, [to])
        if tile.is_amx and self.kernel.fills_blocks:
            whole = number(c + ir.AffineExpr.get_ceil_div(b - c, AMX_SUMMANDS) * AMX_SUMMANDS, end, place.summand)
            with each(end, whole, 2) as summand:
                vector.store(zeros(halves(2 * columns)), self.block, [self._row(place, summand)])

    def _turn_squares(self, place: Place) -> None:
        """Copy a block of which summands are neighbours in memory, in squares of as many pairs as columns."""
        tile, right = self.kernel.tile, self.kernel.right
        b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        pairs = ir.VectorType.get([tile.width], _integer())
        with (
            each(place.summand, self._end(place.summand), 2 * tile.width) as summand,
            each(constant(0), constant(tile.columns), tile.width) as beyond,
        ):
            start = number(b + c, place.column, beyond)
            offsets = (right.at(b, c + i) + k for i in range(tile.width))
            rows = [self._loaded(self.memory.right, number(o, place.batch, start, summand), summand) for o in offsets]
            for i, square in enumerate(transposed([vector.bitcast(pairs, row) for row in rows])):
                to = number(b + 2 * i * tile.columns + 2 * c, self._row(place, summand), beyond)
                vector.store(vector.bitcast(halves(2 * tile.width), square), self.block, [to])

    def _loaded(self, memory: Any, offset: Any, summand: Any) -> Any:
        """A register of summands, the first of which is `summand`; zeros beyond the last one, which are not read."""
        kind = halves(AMX_SUMMANDS)
        if not self.kernel.rest:
            return vector.load(kind, memory, [offset])
        left = number(fixed(self.kernel.sizes.summands) - ir.AffineExpr.get_dim(0), summand)
        mask = vector.create_mask(ir.VectorType.get([AMX_SUMMANDS], ir.IntegerType.get_signless(1)), [left])
        return vector.maskedload(kind, memory, [offset], mask, zeros(kind))

    def _row(self, place: Place, summand: Any) -> Any:
        """The place of a row of pairs, from `summand` on, in the block at `place`."""
        f, p, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        before = (p % self.kernel.copied_panels) * _of_block(self.kernel)
        return number(before + (k - f) * self.kernel.tile.columns, place.summand, place.panel, summand)

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
        amx.add_product(
            self.kernel.tile,
            self._rows(place),
            amx.address(self.block, number(ir.AffineExpr.get_dim(0) * _HALF, self._row(place, place.summand))),
            amx.address(self.sums, number(self._sum() * _SUM, place.strip, place.panel)),
            self._is_first(place),
            None if self.rest is None else self._rest(place),
        )

    def _rows(self, place: Place) -> amx.Rows:
        """The strip, where registers of AMX read it."""
        left, end = self.kernel.left, self._end(place.summand)
        b, r, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        if self.strips is not None:
            begin = amx.address(self.strips.copy)
            stride, steps = (
                self.kernel.strip_stride,
                number(ir.AffineExpr.get_ceil_div(r - b, AMX_SUMMANDS), place.summand, end),
            )
        else:
            offset = (left.at(b, r) + k) * _HALF
            begin = amx.address(self.memory.left, number(offset, place.batch, place.row, place.summand))
            stride, steps = left.outer.one, number(ir.AffineExpr.get_floor_div(r - b, AMX_SUMMANDS), place.summand, end)
        return amx.Rows(begin, arith.constant(_wide(), stride * _HALF), arith.index_cast(_wide(), steps))

    def _rest(self, place: Place) -> Any:
        """Copy the last summands of a strip, filled up with zeros; their address after the last block, else zero."""
        left = self.kernel.left
        b, r = (ir.AffineExpr.get_dim(i) for i in range(2))
        rows, first = self.kernel.tile.rows, self.kernel.sizes.summands - self.kernel.rest
        for i in range(rows):
            offset = number(left.at(b, r + i) + first, place.batch, place.row)
            row = self._loaded(self.memory.left, offset, constant(first))
            vector.store(row, self.rest, [constant(i * AMX_SUMMANDS)])
        begin = amx.address(self.rest)
        return (
            begin if self.kernel.blocks == 1 else arith.select(self._is_last(place), begin, arith.constant(_wide(), 0))
        )

    def _add_vectors(self, place: Place) -> None:
        """Add the product by VDPBF16PS, in as many rows at a time as registers hold."""
        tile = self.kernel.tile
        rows = min(tile.rows, _ROWS) if tile.is_amx or self.kernel.has_pairs else tile.rows
        with each(constant(0), constant(tile.rows), rows) as begin:
            # The last rows may overlap those before, to which one block alone is added.
            above = least([ir.AffineExpr.get_dim(0), fixed(tile.rows - rows)], begin)
            s, p, a = (ir.AffineExpr.get_dim(i) for i in range(3))
            places = [
                number(self._sum() + (a + i) * tile.columns + j * tile.width, place.strip, place.panel, above)
                for i, j in product(range(rows), range(tile.vectors))
            ]
            kind = vector_of(tile.width)
            zero = zeros(kind)
            is_first = self._is_first(place)
            begun = [arith.select(is_first, zero, vector.load(kind, self.sums, [p])) for p in places]
            if self.strips is not None:
                left = [self.strips.row(above, i, place.summand) for i in range(rows)]
            else:
                left = left_rows(self.kernel, place.batch, number(s + p, place.row, above), rows)
            sums = self._added(place, left, begun)
            for total, p in zip(sums, places, strict=True):
                vector.store(total, self.sums, [p])

    def _added(self, place: Place, rows: Sequence[Any], sums: list[Any]) -> list[Any]:
        """The sums after the block at `place` is added; `rows` is where rows begin on the left."""
        begin, end = place.summand, self._end(place.summand)
        stretch, pairs = self.kernel.stretch, self.kernel.left.summand.of_pairs
        if stretch is None or self.strips is not None:
            return self._add_stretch(place, (begin, end), rows, sums)

        def add(first: Any, sums: list[Any]) -> list[Any]:
            f, r = (ir.AffineExpr.get_dim(i) for i in range(2))
            pair = ir.AffineExpr.get_floor_div(f, 2)
            of_rows = [number(r + pairs.to(pair) - pair * pairs.one, first, row) for row in rows]
            return self._add_stretch(place, (first, number(f + stretch, first)), of_rows, sums)

        return loop(begin, end, stretch, sums, add)

    def _add_stretch(self, place: Place, bounds: tuple[Any, Any], rows: Sequence[Any], sums: list[Any]) -> list[Any]:
        """The sums after the summands within `bounds` are added, between whose pairs the left operand has one stride.

        Args:
            place: the place of the block.
            bounds: the first summand, and the first that is not added.
            rows: where the summand 0 of each row would be in the left operand with that stride.
            sums: the sums before.
        """
        tile, (r, k) = self.kernel.tile, (ir.AffineExpr.get_dim(i) for i in range(2))
        apart = 2 if self.strips is not None else self.kernel.left.summand.of_pairs.one
        pair = ir.AffineExpr.get_floor_div(k, 2)

        def add(summand: Any, sums: list[Any]) -> list[Any]:
            right = [self._pairs(place, summand, j) for j in range(tile.vectors)]
            left = [self._pair(number(r + pair * apart, row, summand)) for row in rows]
            return [
                _dot(sums[i * tile.vectors + j], x, y) for (i, x), (j, y) in product(enumerate(left), enumerate(right))
            ]

        return loop(*bounds, 2, sums, add)

    def _pairs(self, place: Place, summand: Any, j: int) -> Any:
        """The pairs of the block for vector `j` of a row of results."""
        width = 2 * self.kernel.tile.width
        offset = number(ir.AffineExpr.get_dim(0) + width * j, self._row(place, summand))
        return vector.load(halves(width), self.block, [offset])

    def _pair(self, offset: Any) -> Any:
        """A pair of the left operand, as often as a vector has pairs."""
        width, memory = self.kernel.tile.width, self.memory.left if self.strips is None else self.strips.copy
        pair = vector.load(halves(2), memory, [offset])
        one = vector.extract(vector.bitcast(ir.VectorType.get([1], _integer()), pair), [], [0])
        every = vector.broadcast(ir.VectorType.get([width], _integer()), one)
        return vector.bitcast(halves(2 * width), every)

    def _write_results(self, place: Place) -> None:
        """Write the rows of the result that are not in the strip before."""
        tile, (of_batch, of_row) = self.kernel.tile, self.kernel.result
        b, r, c, i = (ir.AffineExpr.get_dim(n) for n in range(4))
        kind = vector_of(tile.width)
        rows = [
            vector.load(kind, self.memory.row, [number(b + j * tile.width, place.column)])
            for j in range(tile.vectors if self.memory.row is not None else 0)
        ]
        first = constant(0) if self.kernel.strips == 1 else number(b * tile.rows - r, place.strip, place.row)
        with each(first, constant(tile.rows), 1) as line:
            for j in range(tile.vectors):
                beyond = j * tile.width
                found = number(self._sum() + c * tile.columns + beyond, place.strip, place.panel, line)
                value = vector.load(kind, self.sums, [found])
                if rows:
                    value = arith.addf(value, rows[j])
                if self.kernel.is_rounded:
                    value = arith.truncf(halves(tile.width), value)
                offset = b * of_batch + (r + i) * of_row + c + beyond
                at = number(offset, place.batch, place.row, place.column, line)
                if self.kernel.pads_right:
                    vector.maskedstore(self.memory.result, [at], existing(self.kernel, place.column, beyond), value)
                else:
                    vector.store(value, self.memory.result, [at])

    def _sum(self) -> ir.AffineExpr:
        """The place of a tile's first sum, of the strip and the panel that the first two dimensions name."""
        kernel, (strip, panel) = self.kernel, (ir.AffineExpr.get_dim(i) for i in range(2))
        tile = (strip % kernel.kept_strips) * kernel.kept_panels + panel % kernel.kept_panels
        return tile * (kernel.tile.rows * kernel.tile.columns)

    def _end(self, first: Any) -> Any:
        """The end of the block that begins at the summand `first`."""
        return least([ir.AffineExpr.get_dim(0) + self.kernel.depth, fixed(self.kernel.sizes.summands)], first)

    def _is_last(self, place: Place) -> Any:
        end = constant(self.kernel.sizes.summands)
        return arith.cmpi(arith.CmpIPredicate.eq, self._end(place.summand), end)

    def _is_first(self, place: Place) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, place.summand, constant(0))


def _of_block(kernel: ProductKernel) -> int:
    """The numbers of one panel in a block, whose last registers of AMX are filled up."""
    return -(-kernel.depth // AMX_SUMMANDS) * AMX_SUMMANDS * kernel.tile.columns


def room(elements: int, kind: ir.Type) -> Any:
    """Memory on the stack of the thread, as a memref of rank 1."""
    return memref.alloca(ir.MemRefType.get([elements], kind), [], [], alignment=amx.BYTES)


def _dot(sums: Any, left: Any, right: Any) -> Any:
    """The sums plus the dot products of pairs: VDPBF16PS."""
    return llvm.call_intrinsic(sums.type, "llvm.x86.avx512bf16.dpbf16ps.512", [sums, left, right], [], [])


def _integer() -> ir.Type:
    """The type of a pair as one number."""
    return ir.IntegerType.get_signless(32)


def _wide() -> ir.Type:
    return ir.IntegerType.get_signless(64)
