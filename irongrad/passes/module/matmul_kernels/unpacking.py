"""Code that unpacks numbers of a right operand into float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, vector

from irongrad.memory_model.product_tiles import Tile
from irongrad.mlir.loop_code import number, row_of, vector_of
from irongrad.passes.module.matmul_kernels.packed_weights import BIAS, HALVES, HIGH, LOW, Packing
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel


@dataclass(frozen=True)
class Unpacking:
    """A right operand in few bits.

    Attributes:
        tile: the register tile of the kernel.
        packing: how the operand is stored.
        numbers: the numbers, as a memref of rank 1.
        factors: the scales and the offsets, as memrefs of rank 1; none without them.
    """

    tile: Tile
    packing: Packing
    numbers: Any
    factors: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: ProductKernel, bindings: Sequence[Any]) -> Self:
        """The operand in the given bindings."""
        packing = kernel.packing
        assert packing is not None
        stored, *factors = bindings
        elements = packing.rows * packing.columns // packing.numbers_per_element
        return cls(
            kernel.tile,
            packing,
            row_of(stored, elements, _element_of(packing)),
            tuple(row_of(one, packing.rows * packing.groups) for one in factors),
        )

    def vector_at(self, row: Any, column: Any) -> Any:
        """The float32 values of neighbours in a row of the weight, all in one group."""
        packing, kind = self.packing, vector_of(self.tile.width)
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
        packing, width = self.packing, self.tile.width
        r, c = (ir.AffineExpr.get_dim(i) for i in range(2))
        of_one = packing.numbers_per_element
        place = number(r * (packing.columns // of_one) + ir.AffineExpr.get_floor_div(c, of_one), row, column)
        kind = vector_of(self.tile.width)
        stored = vector.load(ir.VectorType.get([width // of_one], _element_of(packing)), self.numbers, [place])
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
    floats = {"bf16": ir.BF16Type, "f16": ir.F16Type}
    return floats[packing.kind].get() if packing.kind in floats else ir.IntegerType.get_signless(8)


def _integers(kind: ir.Type, values: Sequence[int]) -> Any:
    element = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.DenseElementsAttr.get([ir.IntegerAttr.get(element, v) for v in values], kind))
