"""Hoist the packing of loop-invariant operands of products out of loops.

With data tiling, IREE 3.13.0 packs each operand directly before its product. It packs the weights of a recurrent layer
in every iteration. If they are packed before the loop, an LSTM of two layers of 128 units over 32 steps takes 0.85 of
the time. tests/passes/module/test_hoist_lookups.py tells when IREE no longer does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import PACKING, found_in, outside_loops
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class PackBeforeLoops(ModulePass):
    """Pack operands of products before the loops in which they stay the same.

    Before:
        scf.for %t { %packed = flow.tensor.encode %weight; %h = flow.dispatch @product(%x, %packed) }
    After:
        %packed = flow.tensor.encode %weight; scf.for %t { %h = flow.dispatch @product(%x, %packed) }
    """

    name: ClassVar[str] = "pack-before-loops"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        moved = 0
        for operation in found_in(module, PACKING):
            place = outside_loops(operation, operation.operands)
            if place is not operation:
                operation.move_before(place)
                moved += 1
        return PassResult(moved > 0, {"moved": moved})


PASS = PackBeforeLoops
