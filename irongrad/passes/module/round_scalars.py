"""Round a bfloat16 number that many elements may read, as eager does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith

from irongrad.mlir.linalg import GENERIC
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_ROUND = "arith.truncf"

# A bfloat16 has the upper half of the bits of a float32.
_DROPPED = 16
_BELOW_HALF = (1 << (_DROPPED - 1)) - 1


@dataclass(frozen=True)
class RoundScalars(ModulePass):
    """Round to the numbers of bfloat16 by integer operations, where a kernel's result is a single number.

    Before:
        %h = arith.truncf %x : f32 to bf16
    After:
        %bits = arith.bitcast %x : f32 to i32; ...; %r = arith.bitcast %nearest : i32 to f32
        %h = arith.truncf %r : f32 to bf16

    IREE 3.13.0 drops a rounding that is widened again in the same kernel (`iree-convert-bf16-arith-to-f32`). The
    error of one element is its own. That of a norm or a mean scales all that reads it: torch.optim.Muon divides by a
    norm, and its update was 0.4 % off eager's. tests/passes/module/test_round_scalars.py tells when IREE rounds.
    """

    name: ClassVar[str] = "round-scalars"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        found = [op for op in inside(module.operation) if op.name == _ROUND and _is_of_one_number(op)]
        for rounding in found:
            with rounding.location, ir.InsertionPoint(rounding):
                rounding.operands[0] = _nearest_half(rounding.operands[0])
        return PassResult(bool(found), {"rounded": len(found)})


def _is_of_one_number(rounding: Any) -> bool:
    """Whether an operation rounds a float32 to bfloat16 for the only element of a tensor."""
    loops = rounding.parent
    if loops is None or loops.name != GENERIC or not isinstance(rounding.results[0].type, ir.BF16Type):
        return False
    kinds = [result.type for result in loops.results]
    one = all(kind.has_static_shape and math.prod(kind.shape) == 1 for kind in kinds)
    return one and isinstance(rounding.operands[0].type, ir.F32Type)


def _nearest_half(number: Any) -> Any:
    """The nearest number of bfloat16, as a float32; of two that are equally near, the one whose last bit is 0."""
    word = ir.IntegerType.get_signless(32)

    def bits(value: int) -> Any:
        return arith.constant(word, value)

    old = arith.bitcast(word, number)
    last = arith.andi(arith.shrui(old, bits(_DROPPED)), bits(1))
    moved = arith.addi(arith.addi(old, bits(_BELOW_HALF)), last)
    nearest = arith.bitcast(number.type, arith.andi(moved, bits(-1 << _DROPPED)))
    is_nan = arith.cmpf(arith.CmpFPredicate.UNO, number, number)
    return arith.select(is_nan, number, nearest)


PASS = RoundScalars
