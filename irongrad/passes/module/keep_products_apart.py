"""Products whose elementwise reader reads much else get a kernel of their own."""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, readers_of, size_of, source_of
from irongrad.mlir.walk import inside

# How many values a kernel with a product may read beside the product.
_MOST_PACKED = 2


def keep_products_apart(module: ir.Module) -> None:
    """Hold products whose elementwise reader reads many other values: a kernel of its own then computes that one.

    With data tiling IREE 3.13.0 packs each value that is read beside a product in the product's kernel, which takes it
    a quarter of a second of compile time each, and the step more than the kernel saves. docs/benchmarks.md has figures.

    Args:
        module: as above, with what is elementwise made one already.
    """
    for product in [op.results[0] for op in inside(module.operation) if op.name in PRODUCTS]:
        if any(_beside(product, reader) > _MOST_PACKED for reader in readers_of(product)):
            hold_behind(product)


def _beside(product: Any, reader: Any) -> int:
    """How many values an elementwise reader of a product reads that are as large as the product, and others."""
    if not is_elementwise(reader):
        return 0
    read = set(map(source_of, inputs_of(reader)))
    return sum(value != product and size_of(value) == size_of(product) for value in read)
