"""The code that copies strips of a left operand of bfloat16 to where registers of AMX can read them.

A register reads 32 neighbours of each row, and its rows are a fixed distance apart. The windows of an image are not:
their summands are neighbours in stretches. The rows of a transposed operand are neighbours instead of its summands. A
thread copies one block of a strip and multiplies it by all panels of its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, vector

from irongrad.memory_model.product_tiles import AMX_SUMMANDS
from irongrad.mlir.loop_code import constant, each, number, zeros
from irongrad.passes.module.matmul_kernels import amx
from irongrad.passes.module.matmul_kernels.places import Place
from irongrad.passes.module.matmul_kernels.squares import transposed
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel


@dataclass(frozen=True)
class StripCode:
    """The copies of one workgroup.

    Attributes:
        kernel: the kernel.
        left: the left operand, as a memref of rank 1.
        copy: one block of a strip: its rows, `ProductKernel.strip_stride` elements apart.
    """

    kernel: ProductKernel
    left: Any
    copy: Any

    @classmethod
    def begin(cls, kernel: ProductKernel, left: Any) -> Self:
        """Write what comes before the first strip."""
        kind = ir.MemRefType.get([kernel.tile.rows * kernel.strip_stride], ir.BF16Type.get())
        return cls(kernel, left, memref.alloca(kind, [], [], alignment=amx.BYTES))

    def row(self, above: Any, i: int, first: Any) -> Any:
        """Where the summand 0 of row `above + i` would be in the copy of a block that begins at the summand `first`."""
        a, f = (ir.AffineExpr.get_dim(n) for n in range(2))
        return number((a + i) * self.kernel.strip_stride - f, above, first)

    def write(self, place: Place, end: Any) -> None:
        """Write code that copies the block of a strip that begins at `place`, and fills its last registers with zeros.

        Args:
            place: the place of the strip, in any panel.
            end: the first summand behind the block.
        """
        if self.kernel.left.summand.one == 1:
            self._write_stretches(place, end)
        else:
            self._write_squares(place, end)

    def _write_stretches(self, place: Place, end: Any) -> None:
        """Copy a strip of which summands are neighbours in memory, in stretches."""
        kernel, left = self.kernel, self.kernel.left
        b, r, i, k = (ir.AffineExpr.get_dim(n) for n in range(4))
        kind, stretch = halves(AMX_SUMMANDS), kernel.stretch or kernel.depth
        with each(constant(0), constant(kernel.tile.rows), 1) as line:
            if kernel.fills_blocks:
                whole = ir.AffineExpr.get_ceil_div(r - b, AMX_SUMMANDS) * AMX_SUMMANDS
                last = number(whole - AMX_SUMMANDS + i * kernel.strip_stride, place.summand, end, line)
                vector.store(zeros(kind), self.copy, [last])
            with each(place.summand, end, stretch) as first:
                begin = number(left.at(b, r + i) + left.summand.to(k), place.batch, place.row, line, first)
                to = number(b * kernel.strip_stride + i - r, line, place.summand, first)
                for beyond in range(0, stretch, AMX_SUMMANDS):
                    values = self._loaded(number(b + beyond, begin), min(stretch - beyond, AMX_SUMMANDS))
                    vector.store(values, self.copy, [number(b + beyond, to)])

    def _loaded(self, offset: Any, count: int) -> Any:
        """A register's row of which `count` summands are read, and all others are zeros."""
        kind = halves(AMX_SUMMANDS)
        if count == AMX_SUMMANDS:
            return vector.load(kind, self.left, [offset])
        mask = vector.constant_mask(ir.VectorType.get([AMX_SUMMANDS], ir.IntegerType.get_signless(1)), [count])
        return vector.maskedload(kind, self.left, [offset], mask, zeros(kind))

    def _write_squares(self, place: Place, end: Any) -> None:
        """Copy a strip of which rows are neighbours in memory, in squares of as many pairs of summands as rows."""
        rest = self.kernel.rest
        with each(constant(0), constant(self.kernel.tile.rows), amx.ROWS) as line:
            whole = end
            if rest:
                k = ir.AffineExpr.get_dim(0)
                whole = number(ir.AffineExpr.get_floor_div(k, AMX_SUMMANDS) * AMX_SUMMANDS, end)
                with each(whole, end, AMX_SUMMANDS) as summand:
                    self._write_square(place, line, summand, rest)
            with each(place.summand, whole, AMX_SUMMANDS) as summand:
                self._write_square(place, line, summand, AMX_SUMMANDS)

    def _write_square(self, place: Place, line: Any, summand: Any, count: int) -> None:
        """Copy the `count` summands from `summand` on of as many rows, from `line` on, as a register has."""
        b, i, k = (ir.AffineExpr.get_dim(n) for n in range(3))
        offsets = self._offsets(place, line, summand, count)
        rows = [vector.load(halves(amx.ROWS), self.left, [offset]) for offset in offsets]
        rows += [zeros(halves(amx.ROWS))] * (AMX_SUMMANDS - count)
        pairs = [_pairs(*two) for two in zip(rows[::2], rows[1::2], strict=True)]
        for n, row in enumerate(transposed(pairs)):
            to = number((b + n) * self.kernel.strip_stride + k - i, line, place.summand, summand)
            vector.store(vector.bitcast(halves(AMX_SUMMANDS), row), self.copy, [to])

    def _offsets(self, place: Place, line: Any, summand: Any, count: int) -> Iterator[Any]:
        """Where the rows from `line` on begin in memory, for each of `count` summands."""
        left = self.kernel.left
        b, r, i, k = (ir.AffineExpr.get_dim(n) for n in range(4))
        together = math.gcd(AMX_SUMMANDS, left.summand.width or AMX_SUMMANDS)
        for n in range(0, count, together):
            begin = number(left.at(b, r + i) + left.summand.to(k + n), place.batch, place.row, line, summand)
            for step in range(min(together, count - n)):
                yield number(b + step * left.summand.one, begin)


def _pairs(first: Any, second: Any) -> Any:
    """The pairs of the numbers of two vectors, each pair as a 32-bit integer with the first number in its low half."""
    half, pair = (ir.VectorType.get([amx.ROWS], ir.IntegerType.get_signless(bits)) for bits in (16, 32))
    low, high = (arith.extui(pair, vector.bitcast(half, numbers)) for numbers in (first, second))
    sixteen = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.IntegerAttr.get(pair.element_type, 16)))
    return arith.ori(low, arith.shli(high, sixteen))


def halves(count: int) -> ir.VectorType:
    """A vector of `count` numbers of bfloat16."""
    return ir.VectorType.get([count], ir.BF16Type.get())
