"""Choose the tiles of sums in chunks where IREE would compute one chunk after the other.

IREE 3.13.0 divides the results of a reduction into tiles, and computes several results of a tile at once. The size of a
tile divides the last dimension of the results (KernelDispatch.cpp). GPT-2's logits have rows of 50,257, whose
exponentials are summed in 1,733 chunks. No small number divides 1,733, so IREE computes one chunk after the other. That
takes four times as long (docs/dev/measurements/2026-11-28-xeon.md).
tests/passes/module/test_tile_sums.py tells when IREE chooses better itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.device import cpu_of
from irongrad.mlir.linalg import GENERIC, inputs_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# The results of a tile, and those that are computed at once.
_WIDE, _AT_ONCE = 64, 8

# IREE computes at least so many results at once, if a number from this to `_WIDE` divides their number.
_FEW = 4

# Elements of a vector, and the longest chunk that is read as a whole.
_VECTOR, _SHORT = 16, 64

# The elements that one piece of work reads, about, and its most rows of chunks.
_PIECE, _ROWS = 1 << 18, 16

_INFO = (
    "#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<distribution = {0}, "
    "vector_common_parallel = {1}, vector_reduction = {2}>, "
    "translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
)
_BESIDE = frozenset({"arith.constant", "linalg.fill", "tensor.empty", "func.return"})


@dataclass(frozen=True)
class TileSums(ModulePass):
    """Compute several results of a sum in chunks at once, on x86-64.

    Before:
        linalg.generic (sum over k) ins(%x : tensor<1024x1733x29xf32>)
    After:
        linalg.generic (sum over k) ins(%x : tensor<1024x1733x29xf32>)
            {compilation_info = ... distribution = [16, 64, 0], vector_common_parallel = [1, 8, 0], ...}

    Left alone: kernels that compute something besides the sum, elements other than float32, and unknown sizes.
    """

    name: ClassVar[str] = "tile-sums"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        architecture, features = cpu_of(module)
        if architecture != "x86_64" or ("avx2" not in features and "avx512f" not in features):
            return PassResult(False)
        kernels = [op for op in inside(module.operation) if op.name == "func.func"]
        sums = [found for kernel in kernels if (found := _sum_of(kernel)) is not None]
        for operation, sizes in sums:
            operation.attributes["compilation_info"] = ir.Attribute.parse(_INFO.format(*_tiles(sizes)))
        return PassResult(bool(sums), {"sums": len(sums)})


def _sum_of(kernel: Any) -> tuple[Any, list[int]] | None:
    """The sum that a kernel computes, and its sizes, if IREE would compute it result by result; None otherwise."""
    operations = [op for block in kernel.regions[0].blocks for op in (o.operation for o in block)]
    computed = [op for op in operations if op.name not in _BESIDE and ".dispatch.tensor." not in op.name]
    if len(computed) != 1 or computed[0].name != GENERIC:
        return None
    (found,) = computed
    sizes = _sizes(found)
    if len(sizes) < 2 or sizes[-2] <= _WIDE or any(sizes[-2] % d == 0 for d in range(_FEW, _WIDE + 1)):
        return None
    return found, sizes


def _sizes(operation: Any) -> list[int]:
    """The sizes of the dimensions of a sum of float32 over the last dimension of an operand; empty for all others."""
    kinds = [str(kind) for kind in operation.attributes["iterator_types"]]
    of_last = [("reduction" in kind) == (place == len(kinds) - 1) for place, kind in enumerate(kinds)]
    body = [op.operation.name for op in operation.regions[0].blocks[0]]
    if not all(of_last) or body[-2:] != ["arith.addf", "linalg.yield"] or len(operation.results) != 1:
        return []
    whole = ir.AffineMap.get_identity(len(kinds), operation.context)
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    read = [value.type for value, of in zip(inputs_of(operation), maps, strict=False) if of == whole]
    known = [kind for kind in read if kind.has_static_shape and str(kind.element_type) == "f32"]
    return list(known[0].shape) if known else []


def _tiles(sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """How many results a piece of work has along each dimension, and how many of how many terms it adds at once."""
    *outer, _, chunk = sizes
    ones, rows = [1] * len(outer), [min(n, _ROWS, max(1, _PIECE // (_WIDE * chunk))) for n in outer[-1:]]
    summands = math.ceil(chunk / _VECTOR) * _VECTOR if chunk <= _SHORT else _VECTOR
    return [*ones[1:], *rows, _WIDE, 0], [*ones, _AT_ONCE, 0], [0] * (len(sizes) - 1) + [summands]


PASS = TileSums
