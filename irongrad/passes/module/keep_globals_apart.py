"""Keep IREE from fusing globals that a loop or a branch stores differently.

IREE 3.13.0 fuses globals that are always stored with the same value (Util/Transforms/FuseGlobals.cpp). It compares the
stores at the top level of functions only, but it erases all others, too. IREE keeps a timepoint and a place in memory
in globals beside each part of the state. So it fuses those of a frozen parameter with those of a trained one, and the
stores in the loop of `train_steps` are lost: later steps read the state of an earlier one, or read it too early.

IREE fuses private globals only, and gives the globals beside a global the same visibility. `hide-globals` makes them
private again, after IREE has lowered loops and branches. tests/passes/module/test_keep_globals_apart.py tells when it
is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import GLOBAL, STORE, found_in, global_of, name_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class KeepGlobalsApart(ModulePass):
    """Make the globals public that a loop or a branch stores.

    Before:
        util.global private mutable @w
        scf.while { util.global.store %new, @w }
    After:
        util.global public mutable @w
        scf.while { util.global.store %new, @w }
    """

    name: ClassVar[str] = "keep-globals-apart"
    required: ClassVar[str] = "IREE fuses globals that loops store differently"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        nested = {global_of(store) for store in found_in(module, STORE) if _is_nested(store)}
        kept = [op.operation for op in module.body.operations if op.operation.name == GLOBAL]
        kept = [operation for operation in kept if name_of(operation) in nested]
        for operation in kept:
            operation.attributes["sym_visibility"] = ir.StringAttr.get("public")
        return PassResult(bool(kept), {"kept": len(kept)})


def _is_nested(operation: Any) -> bool:
    return bool(operation.block.owner.operation.name != "util.func")


PASS = KeepGlobalsApart
