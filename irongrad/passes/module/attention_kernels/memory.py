"""The memory of the kernels of attention: the tensors that a thread reads and makes, and what it has on its stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, hal, memref

from irongrad.mlir.loop_code import constant, number, row_of
from irongrad.passes.module.attention_kernels.kernel import AttentionKernel


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of one workgroup of a kernel.

    Attributes:
        kernel: the kernel.
        read: the memory of each tensor that is read.
        results: the memory of the results of readers, then of numbers of rows.
        scores: the memory of the thread for matrices, by `AttentionKernel.buffers`.
        numbers: its memory for reductions, in the order of `AttentionKernel.reductions`.
        matrix: the number of the matrix in the batch.
        part: the number of the part of its groups.
        seen: how many columns of the first row count; None if all do.
    """

    kernel: AttentionKernel
    read: dict[Any, Any]
    results: Sequence[Any]
    scores: Sequence[Any]
    numbers: Sequence[Any]
    matrix: Any
    part: Any
    seen: Any | None

    @classmethod
    def of(cls, kernel: AttentionKernel, bindings: Sequence[Any]) -> Memory:
        """The memory in a function with the arguments `bindings`."""
        given, made = len(kernel.read), len(bindings) - len(kernel.made)
        size = bindings[made - 1] if kernel.region.sizes.batch is None else None
        of_tensors = [*bindings[:given], *bindings[made:]]
        kinds = [*(v.type for v in kernel.read), *kernel.made]
        memory = [
            row_of(b, _elements(k, size), _stored_type(k.element_type)) for b, k in zip(of_tensors, kinds, strict=True)
        ]
        rows, _, larger = kernel.group
        rows += larger > 0
        of_scores = ir.MemRefType.get([rows * kernel.stride], ir.F32Type.get())
        of_numbers = ir.MemRefType.get([rows], ir.F32Type.get())
        scores = [memref.alloca(of_scores, [], [], alignment=64) for _ in range(1 + max(kernel.buffers.values()))]
        numbers = [memref.alloca(of_numbers, [], [], alignment=64) for _ in kernel.reductions]
        part, matrix = (hal.interface_workgroup_id(i) for i in range(2))
        read = dict(zip(kernel.read, memory, strict=False))
        seen = _first_integer(bindings[given]) if kernel.hides else None
        return cls(kernel, read, memory[given:], scores, numbers, matrix, part, seen)


def _elements(kind: Any, size: Any) -> Any:
    """The number of elements of a tensor, or the most it has among `size` matrices."""
    if kind.has_static_shape:
        return math.prod(kind.shape)
    return number(ir.AffineExpr.get_dim(0) * math.prod(kind.shape[1:]), size)


def _stored_type(element: ir.Type) -> ir.Type:
    """The type of an element in memory: IREE stores a bit in a byte."""
    return ir.IntegerType.get_signless(8) if str(element) == "i1" else element


def _first_integer(binding: Any) -> Any:
    """The first of the two 32-bit integers of a tensor, as an index."""
    memory = row_of(binding, 2, ir.IntegerType.get_signless(32))
    return arith.index_cast(ir.IndexType.get(), memref.load(memory, [constant(0)]))
