"""Keep products out of the kernels of elementwise readers that read many other values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, readers_of, size_of, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

# The most other values of the product's size that a kernel with a product may read.
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
    (docs/dev/measurements/2026-11-25-granite-rapids.md). Runs after fuse-elementwise.
    """

    name: ClassVar[str] = "keep-products-apart"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling; without it IREE packs nothing."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        products = [op.results[0] for op in inside(module.operation) if op.name in PRODUCTS]
        apart = [p for p in products if any(_other_inputs(p, reader) > _MOST_PACKED for reader in readers_of(p))]
        for product in apart:
            hold_behind(product)
        return PassResult(bool(apart), {"held": len(apart)})


def _other_inputs(product: Any, reader: Any) -> int:
    """The number of other values of the product's size that an elementwise reader reads; 0 for other readers."""
    if not is_elementwise(reader):
        return 0
    read = set(map(source_of, inputs_of(reader)))
    return sum(value != product and size_of(value) == size_of(product) for value in read)


PASS = KeepProductsApart
