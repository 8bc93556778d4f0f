"""Make all globals private again, once IREE fuses only those that are always stored with the same value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import GLOBAL
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_VISIBILITY = "sym_visibility"
_PRIVATE = "private"


@dataclass(frozen=True)
class HideGlobals(ModulePass):
    """Make public globals private, those that IREE has added beside them included.

    Before:
        util.global public mutable @w
        util.global public mutable @w__timepoint
    After:
        util.global private mutable @w
        util.global private mutable @w__timepoint

    `keep-globals-apart` has made them public. IREE folds and fuses private globals only.
    """

    name: ClassVar[str] = "hide-globals"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        public = [op.operation for op in module.body.operations if op.operation.name == GLOBAL]
        public = [operation for operation in public if _is_public(operation)]
        for operation in public:
            operation.attributes[_VISIBILITY] = ir.StringAttr.get(_PRIVATE)
        return PassResult(bool(public), {"hidden": len(public)})


def _is_public(operation: ir.Operation) -> bool:
    return _VISIBILITY not in operation.attributes or ir.StringAttr(operation.attributes[_VISIBILITY]).value == "public"


PASS = HideGlobals
