"""The buffers that a kernel reads and writes, and the places in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from irongrad.mlir.loop_code import fixed, least, number
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel


@dataclass(frozen=True)
class Memory:
    """The buffers of a kernel, each as a memref of rank 1.

    Attributes:
        left: the left operand.
        right: the right operand; a `RightBlock` if the kernel keeps a block of it in its own memory.
        row: the row that is added to all rows of the result; None without one.
        result: the result.
    """

    left: Any
    right: Any
    row: Any | None
    result: Any


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
    """The first row of a strip."""
    rows = kernel.tile.rows
    return least([ir.AffineExpr.get_dim(0) * rows, fixed(kernel.sizes.rows - rows)], strip)


def first_column(kernel: ProductKernel, panel: Any) -> Any:
    """The first column of a panel."""
    d, columns = ir.AffineExpr.get_dim(0), kernel.tile.columns
    if kernel.pads_right:
        return number(d * columns, panel)
    return least([d * columns, fixed(kernel.sizes.columns - columns)], panel)


def left_rows(kernel: ProductKernel, batch: Any, row: Any, count: int) -> list[Any]:
    """Where each of `count` rows, from `row` on, begins in the left operand."""
    outer, (b, r) = kernel.left.outer, (ir.AffineExpr.get_dim(i) for i in range(2))
    is_apart = outer.width is None or (outer.width % count == 0 and kernel.sizes.rows % count == 0)
    if not is_apart:
        return [number(kernel.left.at(b, r + i), batch, row) for i in range(count)]
    first = number(kernel.left.at(b, r), batch, row)
    return [number(b + i * outer.one, first) for i in range(count)]


def existing(kernel: ProductKernel, column: Any, beyond: int) -> Any:
    """Which columns of a vector the result has; the vector begins `beyond` behind `column`."""
    left = number(fixed(kernel.sizes.columns - beyond) - ir.AffineExpr.get_dim(0), column)
    kind = ir.VectorType.get([kernel.tile.width], ir.IndexType.get())
    return arith.cmpi(arith.CmpIPredicate.slt, vector.step(kind), vector.broadcast(kind, left))
