"""Code that copies a block of a right operand into memory of the thread that uses it, as float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from iree.compiler import ir
from iree.compiler.dialects import memref, vector

from irongrad.mlir.loop_code import bounded, constant, each, number, row_of, vector_of
from irongrad.passes.module.matmul_kernels.squares import transposed
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel
from irongrad.passes.module.matmul_kernels.unpacking import Unpacking


@dataclass(frozen=True)
class RightBlock:
    """A right operand, and the block of it that one thread keeps.

    Attributes:
        kernel: the kernel.
        operand: the operand as it is stored: a memref of rank 1 of float32, or an `Unpacking`.
        block: float32 memory for `kernel.depth` rows of the columns of one tile.
        summands: the size of the reduction dimension, if the launch gives it.
    """

    kernel: ProductKernel
    operand: Any
    block: Any
    summands: Any = None

    @classmethod
    def of(cls, kernel: ProductKernel, bindings: Sequence[Any], elements: Any, summands: Any = None) -> Self:
        """The operand in the given bindings; the memory of the block is on the thread's stack.

        Args:
            kernel: the kernel.
            bindings: those of the operand.
            elements: how many elements the operand has.
            summands: the size of the reduction dimension, if the launch gives it.
        """
        operand = Unpacking.of(kernel, bindings) if kernel.packing else row_of(bindings[0], elements)
        kind = ir.MemRefType.get([kernel.depth * kernel.tile.columns], ir.F32Type.get())
        return cls(kernel, operand, memref.alloca(kind, [], [], alignment=64), summands)

    def vector_at(self, first: Any, summand: Any, step: int, column: int) -> Any:
        """The vector at `column` of the row `summand + step`, of the block that begins at `first`."""
        f, k = (ir.AffineExpr.get_dim(i) for i in range(2))
        place = number((k - f + step) * self.kernel.tile.columns + column, first, summand)
        return vector.load(vector_of(self.kernel.tile.width), self.block, [place])

    def write_block(self, batch: Any, column: Any, first: Any) -> None:
        """Write code that fills the block.

        Args:
            batch: the index of the matrices in the batch.
            column: the block's first column in the operand.
            first: its first index in the reduction dimension.
        """
        d = ir.AffineExpr.get_dim(0)
        end = bounded(number(d + self.kernel.depth, first), self.kernel.sizes.summands, self.summands)
        if self.kernel.right.outer.one == 1:
            with each(first, end, 1) as summand:
                self._copy_row(batch, column, first, summand)
        else:  # along few rows of the operand at a time, as a CPU prefetches few streams
            width = self.kernel.tile.width
            with each(constant(0), constant(self.kernel.tile.columns), width) as c, each(first, end, width) as summand:
                self._turn_square(batch, column, c, first, summand)

    def _copy_row(self, batch: Any, column: Any, first: Any, summand: Any) -> None:
        """Write one row of the block: columns are neighbours in the operand."""
        d = ir.AffineExpr.get_dim(0)
        for beyond in range(0, self.kernel.tile.columns, self.kernel.tile.width):
            values = self._read(batch, number(d + beyond, column), summand)
            self._store(values, first, summand, 0, constant(beyond))

    def _turn_square(self, batch: Any, column: Any, beyond: Any, first: Any, summand: Any) -> None:
        """Transpose a square: summands are neighbours in the operand. Its columns begin at `column + beyond`."""
        c, b = (ir.AffineExpr.get_dim(i) for i in range(2))
        width = self.kernel.tile.width
        columns = [self._read(batch, number(c + b + i, column, beyond), summand) for i in range(width)]
        for i, values in enumerate(transposed(columns)):
            self._store(values, first, summand, i, beyond)

    def _read(self, batch: Any, column: Any, summand: Any) -> Any:
        """A vector of the operand, along the dimension whose elements are neighbours."""
        right = self.kernel.right
        if isinstance(self.operand, Unpacking):
            return self.operand.vector_at(*((summand, column) if right.outer.one == 1 else (column, summand)))
        b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
        place = number(right.at(b, c) + right.summand.to(k), batch, column, summand)
        return vector.load(vector_of(self.kernel.tile.width), self.operand, [place])

    def _store(self, values: Any, first: Any, summand: Any, step: int, beyond: Any) -> None:
        f, k, c = (ir.AffineExpr.get_dim(i) for i in range(3))
        place = number((k - f + step) * self.kernel.tile.columns + c, first, summand, beyond)
        vector.store(values, self.block, [place])
