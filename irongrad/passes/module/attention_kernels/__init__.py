"""Attention on x86-64 CPUs, computed by kernels of our own.

IREE 3.13.0 computes a softmax between two products by six kernels or more, each of which reads and writes all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.memory_model.product_tiles import AMX, HALF_TILES, vector_width
from irongrad.mlir.device import cpu_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module.attention_kernels.launches import Launches
from irongrad.passes.module_pass import ModuleContext, ModulePass


@dataclass(frozen=True)
class AttentionKernels(ModulePass):
    """Compute the softmax of a product, and its gradient, where their readers need them, by kernels of our own.

    Before:
        %s = linalg.batch_matmul(%q, %k); %m = max(%s); %e = exp(%s - %m); %p = %e / sum(%e)
        %o = linalg.batch_matmul(%p, %v)
    After:
        %o:3 = flow.dispatch @attention_0::@attention_0(%q, %k, %v)     # and the largest score and the sum of each row

    A kernel computes few rows of scores at a time, in memory of one thread. The gradient computes the scores again.

    The number of matrices may be known at run time alone.

    IREE computes all others: scores that something else reads, such as attention weights that a model returns, those of
    unknown rows or columns, of one matrix, of fewer than four rows, or of so many columns that a thread has no room for
    four. It computes scores that consist of anything else than products, elementwise code, and sums, maxima and minima
    of rows. It also computes scores of no more columns than a head has, and, with AMX, products of bfloat16 of which no
    mask hides a part.
    """

    name: ClassVar[str] = "attention-kernels"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling, as the kernels of products."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        if (width := vector_width(*cpu_of(module))) is None:
            return PassResult(False)
        blocks = dict.fromkeys(op.block for op in inside(module.operation) if op.name == "linalg.batch_matmul")
        launches = Launches(module, width, _has_amx(module))
        launched = sum(launches.replace(block) for block in blocks)
        return PassResult(launched > 0, {"launches": launched, "kernels": launches.kernels})


def _has_amx(module: ir.Module) -> bool:
    """Whether a module's CPU multiplies bfloat16 by AMX."""
    _, features = cpu_of(module)
    return any(tiles is AMX and feature in features for feature, tiles in HALF_TILES.items())


PASS = AttentionKernels
