"""Drop the barriers around gradients and other values before IREE plans memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER, MARK, release
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class DropBarriers(ModulePass):
    """Drop the barriers that kept values apart in the phase `flow`.

    Before:
        %held = util.optimization_barrier {irongrad.held} %g; flow.dispatch @update(%held)
    After:
        flow.dispatch @update(%g)

    IREE 3.13.0 frees no memory behind a barrier and ends a command buffer at each. A user's own barriers stay.
    """

    name: ClassVar[str] = "drop-barriers"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        barriers = [op for op in inside(module.operation) if op.name == BARRIER and MARK in op.attributes]
        for barrier in barriers:
            release(barrier.results[0])
        return PassResult(bool(barriers), {"dropped": len(barriers)})


PASS = DropBarriers
