"""The buffers that a kernel reads and writes, and the places in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from irongrad.mlir.loop_code import fixed, least, number, smaller
from irongrad.passes.module.matmul_kernels.tiling import Matrix, ProductKernel


@dataclass(frozen=True)
class Memory:
    """The buffers of a kernel, each as a memref of rank 1.

    Attributes:
        left: the left operand.
        right: the right operand; a `RightBlock` if the kernel keeps a block of it in its own memory.
        row: the row that is added to all rows of the result; None without one.
        result: the result.
        size: the size `ProductKernel.open`, which the launch gives; None without one.
    """

    left: Any
    right: Any
    row: Any | None
    result: Any
    size: Any = None

    def given(self, kernel: ProductKernel, letter: str) -> Any | None:
        """The size with that letter, if the launch gives it."""
        return self.size if kernel.open == letter else None


@dataclass(frozen=True)
class Place:
    """The position of a tile and of a block of the reduction dimension.

    Attributes:
        batch: the index of the matrices in the batch.
        strip: the index of the strip.
        row: the tile's first row.
        panel: the index of the panel.
        column: the tile's first column.
        summand: the block's first index in the reduction dimension.
    """

    batch: Any
    strip: Any
    row: Any
    panel: Any
    column: Any
    summand: Any


def first_row(kernel: ProductKernel, strip: Any) -> Any:
    """The first row of a strip. Of rows that the launch counts, the last strip may have some that do not exist."""
    rows = kernel.tile.rows
    if kernel.open == "r":
        return number(ir.AffineExpr.get_dim(0) * rows, strip)
    return least([ir.AffineExpr.get_dim(0) * rows, fixed(kernel.sizes.rows - rows)], strip)


def first_column(kernel: ProductKernel, panel: Any) -> Any:
    """The first column of a panel."""
    d, columns = ir.AffineExpr.get_dim(0), kernel.tile.columns
    if kernel.pads_right:
        return number(d * columns, panel)
    return least([d * columns, fixed(kernel.sizes.columns - columns)], panel)


def left_rows(kernel: ProductKernel, batch: Any, row: Any, count: int, size: Any = None) -> list[Any]:
    """Where each of `count` rows, from `row` on, begins in the left operand.

    `size` is the one that the launch gives. If it is that of the rows, the last row stands for those that do not exist.
    """
    if size is not None and kernel.open != "b":
        return [_left_row(kernel, batch, number(ir.AffineExpr.get_dim(0) + i, row), size) for i in range(count)]
    outer, (b, r) = kernel.left.outer, (ir.AffineExpr.get_dim(i) for i in range(2))
    is_apart = outer.width is None or (outer.width % count == 0 and kernel.sizes.rows % count == 0)
    if not is_apart:
        return [number(kernel.left.at(b, r + i), batch, row) for i in range(count)]
    first = number(kernel.left.at(b, r), batch, row)
    return [number(b + i * outer.one, first) for i in range(count)]


def _left_row(kernel: ProductKernel, batch: Any, row: Any, size: Any) -> Any:
    """Where a row of the left operand begins, whose number of rows or of summands is `size`."""
    b, r = (ir.AffineExpr.get_dim(i) for i in range(2))
    if kernel.open == "k" and kernel.left.summand.one == 1:
        return arith.muli(number(b * kernel.left.batch + r, batch, row), size)
    matrix = matrix_in(kernel.left, batch, size)
    return number(kernel.left.at(b, r), matrix, existing_row(kernel, row, size))


def matrix_in(operand: Matrix, batch: Any, size: Any) -> Any:
    """What the stride between matrices of an operand is multiplied by; `size` is the one that the launch gives."""
    return arith.muli(batch, size) if operand.batch_is_open else batch


def existing_row(kernel: ProductKernel, row: Any, size: Any) -> Any:
    """A row of the left operand and of the result, or their last one if the launch has given a `size` of fewer rows."""
    return smaller(row, number(ir.AffineExpr.get_dim(0) - 1, size)) if kernel.open == "r" else row


def existing(kernel: ProductKernel, column: Any, beyond: int) -> Any:
    """Which columns of a vector the result has; the vector begins `beyond` behind `column`."""
    left = number(fixed(kernel.sizes.columns - beyond) - ir.AffineExpr.get_dim(0), column)
    kind = ir.VectorType.get([kernel.tile.width], ir.IndexType.get())
    return arith.cmpi(arith.CmpIPredicate.slt, vector.step(kind), vector.broadcast(kind, left))
