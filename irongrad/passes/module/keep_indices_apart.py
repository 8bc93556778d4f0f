"""Keep the computation of indices out of the kernel that scatters with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import GENERIC, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SCATTER = "iree_linalg_ext.scatter"
_INDICES = 1  # operand of a scatter, behind the updates


@dataclass(frozen=True)
class KeepIndicesApart(ModulePass):
    """Compute indices of any size before the kernel that scatters with them.

    Before:
        %i = linalg.generic ... -> tensor<?x2xi64>; %r = iree_linalg_ext.scatter ins(%u, %i) ...
    After:
        %i = linalg.generic ...; %held = util.optimization_barrier %i; %r = iree_linalg_ext.scatter ins(%u, %held) ...

    IREE 3.13.0 takes the computation into the scatter's kernel, and holds the indices of all updates on the stack
    there: "'memref.alloca' op expected no unbounded stack allocations".
    tests/passes/module/test_keep_indices_apart.py tells when it does not.
    """

    name: ClassVar[str] = "keep-indices-apart"
    required: ClassVar[str] = "the module may not compile without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        scatters = [op for op in inside(module.operation) if op.name == _SCATTER and _computes(op.operands[_INDICES])]
        for scatter in scatters:
            scatter.operands[_INDICES] = hold(scatter.operands[_INDICES], ir.InsertionPoint(scatter))
        return PassResult(bool(scatters), {"held": len(scatters)})


def _computes(indices: Any) -> bool:
    """Whether an operation of linalg computes these indices, and their number is known at run time alone."""
    owner = source_of(indices).owner
    return (
        not isinstance(owner, ir.Block) and owner.name == GENERIC and not ir.ShapedType(indices.type).has_static_shape
    )


PASS = KeepIndicesApart
