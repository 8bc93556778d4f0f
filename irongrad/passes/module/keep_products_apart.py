"""Products whose elementwise reader reads much else get a kernel of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, readers_of, size_of, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

# How many values a kernel with a product may read beside the product.
_MOST_PACKED = 2


@dataclass(frozen=True)
class KeepProductsApart(ModulePass):
    """Give a product a kernel of its own if its elementwise reader reads many other values.

    Before:
        %p = linalg.matmul ...; %r = linalg.generic ins(%p, %a, %b, %c) {...}
    After:
        %p = linalg.matmul ...; %held = util.optimization_barrier %p; %r = linalg.generic ins(%held, %a, %b, %c) {...}

    With data tiling IREE 3.13.0 packs each value that is read beside a product in the product's kernel. That costs a
    quarter of a second of compile time for each, and the step more time than the fused kernel saves
    (docs/benchmarks.md). Runs after fuse-elementwise.
    """

    name: ClassVar[str] = "keep-products-apart"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling, which packs."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        products = [op.results[0] for op in inside(module.operation) if op.name in PRODUCTS]
        apart = [p for p in products if any(_beside(p, reader) > _MOST_PACKED for reader in readers_of(p))]
        for product in apart:
            hold_behind(product)
        return PassResult(bool(apart), {"held": len(apart)})


def _beside(product: Any, reader: Any) -> int:
    """How many values an elementwise reader of a product reads that are as large as the product, and others."""
    if not is_elementwise(reader):
        return 0
    read = set(map(source_of, inputs_of(reader)))
    return sum(value != product and size_of(value) == size_of(product) for value in read)


PASS = KeepProductsApart
