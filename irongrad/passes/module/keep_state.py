"""Keep IREE from updating a tensor of the state in place, if the step leaves that tensor as it is.

An update makes a copy of its target first. IREE 3.13.0 drops the copy if nothing reads the target afterwards, in its
pass ElideAsyncCopies (compiler/src/iree/compiler/Dialect/Stream/Transforms/ElideAsyncCopies.cpp). If the target is
loaded from a global, the global is read by the next call. IREE does not look at that, so the update changes the state.

This pass adds a last reader of the global's value at the end of its block. tests/passes/module/test_keep_state.py tells
when IREE is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.updates import KERNEL, UPDATE, targets_of, viewed
from irongrad.mlir.walk import LOAD, STORE, found_in, global_of, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class KeepState(ModulePass):
    """Read a value of the state once more after it is updated into another value.

    Before:
        %old = util.global.load @w; %new = flow.tensor.update %part, %old[%c1]
        util.global.store %new, @other
    After:
        %old = util.global.load @w; %new = flow.tensor.update %part, %old[%c1]
        util.global.store %new, @other; util.optimization_barrier %old
    """

    name: ClassVar[str] = "keep-state"
    required: ClassVar[str] = "IREE updates the state that a step leaves as it is"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        targets = [viewed(t) for op in found_in(module, UPDATE, KERNEL) for t in targets_of(op)]
        loads = list(dict.fromkeys(owner_of(t) for t in targets if owner_of(t).name == LOAD))
        kept = [load for load in loads if not _is_overwritten(load)]
        for load in kept:
            last = list(load.block)[-1]
            with last.location, ir.InsertionPoint(last):
                ir.Operation.create(BARRIER, [load.results[0].type], [load.results[0]])
        return PassResult(bool(kept), {"kept": len(kept)})


def _is_overwritten(load: Any) -> bool:
    """Whether another value is stored in the global afterwards, in the same block."""
    after = (op.operation for op in load.block if load.is_before_in_block(op.operation))
    return any(op.name == STORE and global_of(op) == global_of(load) for op in after)


PASS = KeepState
