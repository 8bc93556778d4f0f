"""Code that unpacks a block of a right operand into float32, in memory of the thread that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, vector

from irongrad.passes.module.matmul_kernels.loop_code import constant, each, fixed, least, number, row_of, vector_of
from irongrad.passes.module.matmul_kernels.packed_weights import BIAS, HALVES, HIGH, LOW, Packing
from irongrad.passes.module.matmul_kernels.squares import transposed
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel


@dataclass(frozen=True)
class Unpacking:
    """A right operand in few bits, and the block of it that is unpacked.

    Attributes:
        kernel: the kernel.
        packing: how the right operand is stored.
        numbers: the numbers, as a memref of rank 1.
        factors: the scales and the offsets, as memrefs of rank 1; none without them.
        block: float32 memory for `kernel.depth` rows of the columns of one tile.
    """

    kernel: ProductKernel
    packing: Packing
    numbers: Any
    factors: tuple[Any, ...]
    block: Any

    @classmethod
    def of(cls, kernel: ProductKernel, bindings: Sequence[Any]) -> Self:
        """The operand in the given bindings; the memory of the block is on the thread's stack."""
        packing = kernel.packing
        assert packing is not None
        stored, *factors = bindings
        elements = packing.rows * packing.columns // packing.numbers_per_element
        kind = ir.MemRefType.get([kernel.depth * kernel.tile.columns], ir.F32Type.get())
        return cls(
            kernel,
            packing,
            row_of(stored, elements, _element_of(packing)),
            tuple(row_of(one, packing.rows * packing.groups) for one in factors),
            memref.alloca(kind, [], [], alignment=64),
        )

    def vector_at(self, first: Any, summand: Any, step: int, column: int) -> Any:
        """The vector at `column` of the row `summand + step`, of the block that begins at `first`."""
        f, k = (ir.AffineExpr.get_dim(i) for i in range(2))
        place = number((k - f + step) * self.kernel.tile.columns + column, first, summand)
        return vector.load(vector_of(self.kernel.tile), self.block, [place])

    def write_block(self, column: Any, first: Any) -> None:
        """Write code that unpacks the block of the columns from `column` on, which begins at the summand `first`."""
        d = ir.AffineExpr.get_dim(0)
        end = least([d + self.kernel.depth, fixed(self.kernel.sizes.summands)], first)
        if self.kernel.right.outer.one == 1:
            with each(first, end, 1) as summand:
                self._copy_row(column, first, summand)
        else:  # along few rows of the weight at a time, as a CPU prefetches few streams
            width = self.kernel.tile.width
            with each(constant(0), constant(self.kernel.tile.columns), width) as c, each(first, end, width) as summand:
                self._turn_square(column, c, first, summand)

    def _copy_row(self, column: Any, first: Any, summand: Any) -> None:
        """Unpack one row of the block: neighbours in the row are neighbours in the weight's row."""
        d = ir.AffineExpr.get_dim(0)
        for beyond in range(0, self.kernel.tile.columns, self.kernel.tile.width):
            values = self._unpacked(summand, number(d + beyond, column))
            self._store(values, first, summand, 0, constant(beyond))

    def _turn_square(self, column: Any, beyond: Any, first: Any, summand: Any) -> None:
        """Unpack and transpose a square: the weight's rows from `column + beyond` on are columns of the block."""
        c, b = (ir.AffineExpr.get_dim(i) for i in range(2))
        rows = [self._unpacked(number(c + b + i, column, beyond), summand) for i in range(self.kernel.tile.width)]
        for i, values in enumerate(transposed(rows)):
            self._store(values, first, summand, i, beyond)

    def _store(self, values: Any, first: Any, summand: Any, step: int, beyond: Any) -> None:
        f, k, c = (ir.AffineExpr.get_dim(i) for i in range(3))
        place = number((k - f + step) * self.kernel.tile.columns + c, first, summand, beyond)
        vector.store(values, self.block, [place])

    def _unpacked(self, row: Any, column: Any) -> Any:
        """The float32 values of neighbours in a row of the weight, all in one group."""
        packing, kind = self.packing, vector_of(self.kernel.tile)
        values = self._widened(row, column)
        if not self.factors:
            return values
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        group = number(r * packing.groups + ir.AffineExpr.get_floor_div(c, packing.group), row, column)
        for combine, factors in zip((arith.mulf, arith.addf), self.factors, strict=False):
            values = combine(values, vector.broadcast(kind, memref.load(factors, [group])))
        return values

    def _widened(self, row: Any, column: Any) -> Any:
        """The numbers of neighbours in a row of the weight, as float32."""
        packing, width = self.packing, self.kernel.tile.width
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        of_one = packing.numbers_per_element
        place = number(r * (packing.columns // of_one) + ir.AffineExpr.get_floor_div(c, of_one), row, column)
        kind = vector_of(self.kernel.tile)
        stored = vector.load(ir.VectorType.get([width // of_one], _element_of(packing)), self.numbers, [place])
        if packing.kind == "f32":
            return stored
        if packing.kind in HALVES:
            return arith.extf(kind, stored)
        whole = ir.VectorType.get([width], ir.IntegerType.get_signless(32))
        if packing.kind == "i8":
            return arith.sitofp(kind, arith.extsi(whole, stored))
        twice = vector.shuffle(stored, stored, [i // 2 for i in range(width)])
        shifts = _integers(whole, [HIGH * (i % 2) for i in range(width)])
        halves = arith.andi(arith.shrui(arith.extui(whole, twice), shifts), _integers(whole, [LOW] * width))
        return arith.sitofp(kind, arith.subi(halves, _integers(whole, [BIAS] * width)))


def _element_of(packing: Packing) -> ir.Type:
    """The type of the elements in which numbers are stored."""
    floats = {"bf16": ir.BF16Type, "f16": ir.F16Type, "f32": ir.F32Type}
    return floats[packing.kind].get() if packing.kind in floats else ir.IntegerType.get_signless(8)


def _integers(kind: ir.Type, values: Sequence[int]) -> Any:
    element = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.DenseElementsAttr.get([ir.IntegerAttr.get(element, v) for v in values], kind))
