"""Elementwise operations of linalg made one where they read the same and are for several readers.

What several read is a kernel of its own, unless IREE's pass FuseMultiUseElementwiseProducer makes it one with a reader.
In its phase `flow` IREE 3.13.0 runs it twice (DispatchCreation/Passes.cpp), and each time a producer goes to its first
reader alone, so of the chains that a recurrent layer and its gradients are, or that Adam is, several kernels are left.
Run as often as they are long, it leaves one: a step of the medium LSTM launches 177 kernels in place of 248
(docs/benchmarks.md). tests/passes/module/test_fuse_elementwise.py tells when IREE does that itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.memory_model.fusion_limits import LARGEST, ROUNDS
from irongrad.mlir.barriers import hold_behind, release
from irongrad.mlir.linalg import GENERIC, is_elementwise, readers_of, reduces, size_of
from irongrad.mlir.tools import run_pipeline
from irongrad.mlir.walk import STORE, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# IREE's own order: first what one operation alone reads.
_FUSE = "iree-dispatch-creation-elementwise-op-fusion,iree-flow-canonicalize,cse"
_FUSE_FOR_SEVERAL = f"iree-dispatch-creation-fuse-multi-use-elementwise-producer{{num-iterations={ROUNDS}}}"


@dataclass(frozen=True)
class FuseElementwise(ModulePass):
    """Fuse linalg elementwise operations that share inputs, even if they have several users.

    Before:
        %m = linalg.generic ins(%g, %m0) {...}; %v = linalg.generic ins(%g, %v0) {...}
        %p = linalg.generic ins(%m, %v) {...}
    After:
        %m, %v, %p = linalg.generic ins(%g, %m0, %v0) {...}

    An operation that a reduction reads is left to IREE, which computes it in the reduction's kernel.

    Raises:
        InternalError: IREE's passes fail.
    """

    name: ClassVar[str] = "fuse-elementwise"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        before = _count(module)
        run_pipeline(module, _FUSE)
        found = [result for op in inside(module.operation) if is_elementwise(op) for result in op.results]
        held = [hold_behind(result) for result in found if _is_for_others(result)]
        run_pipeline(module, _FUSE_FOR_SEVERAL)
        for value in held:
            release(value)
        fused = before - _count(module)
        return PassResult(fused > 0, {"fused": fused})


def _count(module: ir.Module) -> int:
    return sum(op.name == GENERIC for op in inside(module.operation))


def _is_for_others(result: Any) -> bool:
    """Whether what reads the result of an elementwise operation had better not compute it.

    What is stored becomes a part of the state, and is written in any case.
    """
    readers = list(readers_of(result))
    if any(map(reduces, readers)):
        return True
    return size_of(result) > LARGEST and not any(reader.name == STORE for reader in readers)


PASS = FuseElementwise
