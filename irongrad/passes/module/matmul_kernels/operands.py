"""The operands of a product as its kernel reads them: as they are, transposed, or packed into blocks of columns."""

from __future__ import annotations

import math
from typing import Any

from iree.compiler import ir

from irongrad.memory_model.product_tiles import WIDTH, Tile
from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import GENERIC, is_elementwise, producer_of, source_of
from irongrad.mlir.transposes import Lettered, copied, padded, size_along, split
from irongrad.mlir.walk import outside_loops
from irongrad.passes.module.matmul_kernels.products import Product
from irongrad.passes.module.matmul_kernels.tiling import Matrix, Strides


def as_it_is(operand: Lettered, outer: str, product: Product) -> tuple[Any, Matrix]:
    """An operand and its layout in memory; `outer` is the letter of its dimension that is not reduced: `r` or `c`."""
    value, letters = operand
    apart = {x: math.prod(product.sizes[y] for y in letters[i + 1 :]) for i, x in enumerate(letters)}
    kind = value.type
    elements = math.prod(kind.shape if kind.has_static_shape else [product.sizes[x] for x in letters])
    is_open = product.open != "" and product.open in letters.partition("b")[2]
    batch = apart.get("b", 0) // (product.sizes[product.open] if is_open else 1)
    strides = Strides(apart.get(outer, 0)), Strides(apart.get("k", 0))
    return value, Matrix(elements, batch, *strides, batch_is_open=is_open)


def turned(product: Product) -> Lettered:
    """The left operand, copied to row-major order; the copy is hoisted out of loops that do not change the operand.

    If the operand is computed elementwise, it is put behind a barrier first. Otherwise IREE 3.13.0 fuses the copy with
    what computes the operand. For the gradient of a ReLU of 1024x1024 the fused operation takes 6.2 ms, both apart 2.2.
    For a gradient of 3x8x6x128x64 that is itself a copy of a transpose, it takes twelve times as long: its loops follow
    the order of neither side, and IREE finds no tiles for them.
    """
    value, letters = product.left
    source = source_of(value)
    if producer_of(source) == GENERIC and is_elementwise(source.owner):
        value = hold_behind(value)
    order = "b" * ("b" in letters) + "rk"
    with product.operation.location, ir.InsertionPoint(outside_loops(product.operation, [value])):
        return copied((value, letters), order), order


def in_rows(product: Product) -> Lettered:
    """The right operand, copied if a kernel cannot read it: neighbours are columns, or summands of bfloat16."""
    value, letters = product.right
    if letters.endswith("c") or (product.multiplies_halves and letters.endswith("k")):
        return product.right
    order = "b" * ("b" in letters) + "kc"
    with product.operation.location, ir.InsertionPoint(outside_loops(product.operation, [value])):
        return copied((value, letters), order), order


def in_blocks(product: Product, columns: int | None = None, summands: str = "k") -> tuple[Any, Matrix]:
    """The right operand, packed into column blocks, and its layout; hoisted out of loops that do not change it.

    Args:
        product: the product.
        columns: how many columns the blocks have together, if they have zeros behind those of the operand.
        summands: the letters of the dimensions that are reduced, in the order of the blocks.
    """
    value, letters = product.right
    before, dimension = product.operation, letters.index("c")
    columns = product.sizes["c"] if columns is None else columns
    width = math.gcd(columns, WIDTH)
    with before.location, ir.InsertionPoint(outside_loops(before, [value])):
        if columns > product.sizes["c"]:
            value = padded(value, dimension, columns)
        pieces = split(value, dimension, width), letters.replace("c", "nc")
        blocks = copied(pieces, f"{'b' * ('b' in letters)}n{summands}c")
    of_matrix = columns * product.sizes["k"]
    steps = Strides(1, width, Strides(width * product.sizes["k"])), Strides(width)
    return blocks, Matrix(math.prod(value.type.shape), of_matrix * ("b" in letters), *steps)


def in_pairs(product: Product, tile: Tile) -> tuple[Any, Matrix]:
    """The right operand of bfloat16 in panels of pairs, as a kernel copies it, and its layout; hoisted out of loops."""
    value, letters = product.right
    columns, summands = tile.columns, product.sizes["k"]
    with product.operation.location, ir.InsertionPoint(outside_loops(product.operation, [value])):
        value = split(value, letters.index("c"), columns)
        letters = letters.replace("c", "nc")
        pairs = split(value, letters.index("k"), tile.summands), letters.replace("k", "kp")
        panels = copied(pairs, "nkcp")
    of_columns, of_summands = Strides(2, columns, Strides(columns * summands)), Strides(1, 2, Strides(2 * columns))
    return panels, Matrix(math.prod(value.type.shape), 0, of_columns, of_summands)


def open_size(product: Product) -> list[Any]:
    """The size that is known at run time alone, read at the current insertion point; empty without one."""
    if not product.open:
        return []
    value, letters = next(operand for operand in (product.left, product.right) if product.open in operand[1])
    return [size_along(value, letters.index(product.open))]
