"""Drop the index checks that torch-mlir puts inside a gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class DropIndexChecks(ModulePass):
    """Drop the checks that torch-mlir puts inside the loops of a gather.

    Before:
        %r = linalg.generic ... { ^bb0(%index: i64, ...): cf.assert %in_range, "index"; %x = tensor.extract %t[%i] ... }
    After:
        %r = linalg.generic ... { ^bb0(%index: i64, ...): %x = tensor.extract %t[%i] ... }

    torch-mlir 20261001 checks each index there. IREE 3.13.0 runs no such check, as devices cannot fail, but it splits
    the gather's loops for it and computes the indices in a kernel of their own. Entry points check the indices that a
    user gives.
    """

    name: ClassVar[str] = "drop-index-checks"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        loops = [op for op in inside(module.operation) if op.name == GENERIC]
        checks = [op for loop in loops for op in inside(loop) if op.name == "cf.assert"]
        for check in checks:
            check.erase()
        return PassResult(bool(checks), {"dropped": len(checks)})


PASS = DropIndexChecks
