"""Keep the computation of updates and indices out of the kernel that scatters them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import GENERIC, producer_of, size_of, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SCATTER = "iree_linalg_ext.scatter"
_READ = 2  # the first operands of a scatter: updates and indices

# The most elements of a tensor that may be on the stack of a scatter's kernel.
_MOST = 1 << 12


@dataclass(frozen=True)
class KeepScattersApart(ModulePass):
    """Compute what a scatter reads before its kernel, if it is large or of any size.

    Before:
        %u = linalg.generic ... -> tensor<?x8xf32>; %r = iree_linalg_ext.scatter ins(%u, %i) ...
    After:
        %u = linalg.generic ...; %held = util.optimization_barrier %u; %r = iree_linalg_ext.scatter ins(%held, %i) ...

    IREE 3.13.0 takes some of the computation into the scatter's kernel, such as that of indices, or the widening of
    updates of bfloat16. It holds the whole of it on the stack there: "exceeded stack allocation limit", or "expected no
    unbounded stack allocations". tests/passes/module/test_keep_scatters_apart.py tells when it does not.
    """

    name: ClassVar[str] = "keep-scatters-apart"
    required: ClassVar[str] = "the module may not compile without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        held = 0
        for scatter in [op for op in inside(module.operation) if op.name == _SCATTER]:
            for place in range(_READ):
                if _is_computed(scatter.operands[place]):
                    scatter.operands[place] = hold(scatter.operands[place], ir.InsertionPoint(scatter))
                    held += 1
        return PassResult(held > 0, {"held": held})


def _is_computed(value: Any) -> bool:
    """Whether an operation of linalg computes this tensor, and it may be large."""
    return producer_of(source_of(value)) == GENERIC and size_of(value) > _MOST


PASS = KeepScattersApart
