"""Keep products out of the kernels of elementwise readers that read many other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
        read = cache(_read)
        apart = [p for p in products if any(_others(p, read(r)) > _MOST_PACKED for r in readers_of(p))]
        for product in apart:
            hold_behind(product)
        return PassResult(bool(apart), {"held": len(apart)})


@dataclass(frozen=True)
class _Read:
    """What an operation reads.

    Attributes:
        values: the values, each once.
        of_size: the number of these values, by size.
    """

    values: frozenset[Any]
    of_size: Mapping[float, int]


def _read(reader: Any) -> _Read:
    """What an elementwise operation reads, through reshapes; nothing for another operation."""
    values = frozenset(map(source_of, inputs_of(reader)) if is_elementwise(reader) else ())
    return _Read(values, Counter(map(size_of, values)))


def _others(product: Any, read: _Read) -> int:
    """The number of values of the product's size that are read beside it."""
    return read.of_size.get(size_of(product), 0) - (product in read.values)


PASS = KeepProductsApart
