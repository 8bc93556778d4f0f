"""Keep a contraction with an inner batch dimension out of the kernel of its readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import GENERIC, inputs_of, readers_of, reduces
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

_CASTS = frozenset({"arith.extf", "arith.truncf", "arith.extsi", "arith.extui"})
_SUMS_OF_PRODUCTS = (["arith.mulf", "arith.addf"], ["arith.muli", "arith.addi"])


@dataclass(frozen=True)
class KeepContractionsApart(ModulePass):
    """Give a contraction a kernel of its own if a batch dimension of its result comes behind another dimension.

    Before:
        %s = linalg.generic (sum over k of x[i, b, k] * w[b, k]) ...; %r = linalg.generic ins(%s, %a) {...}
    After:
        %s = linalg.generic ...; %held = util.optimization_barrier %s; %r = linalg.generic ins(%held, %a) {...}

    `(x * w).sum(-1, keepdim=True) * a` has one, where `w` has no first dimension. With data tiling IREE 3.13.0 packs
    the contraction's operands. It cannot then divide the work of a kernel that also has a reader with more loops:
    "write affecting operations on global resources are restricted to workgroup distributed contexts".
    tests/passes/module/test_keep_contractions_apart.py tells when it can. Runs after fuse-elementwise, which makes
    contractions of products and sums.
    """

    name: ClassVar[str] = "keep-contractions-apart"
    required: ClassVar[str] = "the module may not compile without it"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling; without it IREE packs nothing."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        found = [op.results[0] for op in inside(module.operation) if _is_contraction(op) and _has_inner_batch(op)]
        apart = [result for result in found if any(reader.name == GENERIC for reader in readers_of(result))]
        for result in apart:
            hold_behind(result)
        return PassResult(bool(apart), {"held": len(apart)})


def _is_contraction(operation: Any) -> bool:
    """Whether an operation is a `linalg.generic` that adds products of two tensors."""
    if operation.name != GENERIC or not reduces(operation) or len(inputs_of(operation)) != 2:
        return False
    *names, _ = (op.operation.name for op in operation.regions[0].blocks[0])
    return [name for name in names if name not in _CASTS] in _SUMS_OF_PRODUCTS


def _has_inner_batch(operation: Any) -> bool:
    """Whether a loop of both inputs comes behind a loop of one input in the result."""
    left, right, result = ([str(loop) for loop in m.value.results] for m in operation.attributes["indexing_maps"])
    is_batch = [loop in left and loop in right for loop in result]
    return is_batch != sorted(is_batch, reverse=True)


PASS = KeepContractionsApart
