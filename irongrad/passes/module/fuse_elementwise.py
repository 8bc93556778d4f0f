"""Fuse elementwise operations of linalg whose results have several readers.

A value with several readers gets a kernel of its own, unless IREE's pass FuseMultiUseElementwiseProducer fuses it with
a reader. IREE 3.13.0 runs that pass twice in its phase `flow` (DispatchCreation/Passes.cpp). Each run fuses a producer
with its first reader only. So several kernels are left of the long chains in Adam and in recurrent layers and their
gradients. If the pass runs as often as a chain is long, one kernel is left. A step of the medium LSTM then launches 177
kernels instead of 248 (docs/dev/measurements/2026-11-25-granite-rapids.md).
tests/passes/module/test_fuse_elementwise.py tells when IREE does that itself.
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

# IREE's own order: it fuses producers with a single reader first.
_FUSE = "iree-dispatch-creation-elementwise-op-fusion,iree-flow-canonicalize,cse"
_FUSE_MULTI_USE = f"iree-dispatch-creation-fuse-multi-use-elementwise-producer{{num-iterations={ROUNDS}}}"

# Each result of a kernel is a binding, and each input may be one. IREE 3.13.0 makes kernels of over 32 bindings,
# but loads none ("binding count 35 > 32"). Later it fuses further operations into a kernel, so the limit here is lower.
# Test: test_results_of_one_kernel_are_split_among_several.
_MOST_BINDINGS = 20
_MOST_RESULTS = 16


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
        held = [hold_behind(result) for result in found if _stays_apart(result)]
        run_pipeline(module, _FUSE_MULTI_USE)
        for value in held:
            release(value)
        if _split(module):
            run_pipeline(module, _FUSE)  # drops the results of each part that nothing reads
        fused = before - _count(module)
        return PassResult(fused > 0, {"fused": fused})


def _split(module: ir.Module) -> bool:
    """Compute the results of an operation with very many in several operations; return whether there was one."""
    found = [op for op in inside(module.operation) if is_elementwise(op) and len(op.operands) > _MOST_BINDINGS]
    for operation in found:
        for first in range(_MOST_RESULTS, len(operation.results), _MOST_RESULTS):
            copy = operation.clone(ir.InsertionPoint(operation))
            for place in range(first, min(first + _MOST_RESULTS, len(operation.results))):
                operation.results[place].replace_all_uses_with(copy.results[place])
    return bool(found)


def _count(module: ir.Module) -> int:
    return sum(op.name == GENERIC for op in inside(module.operation))


def _stays_apart(result: Any) -> bool:
    """Whether the result of an elementwise operation stays out of its readers' kernels.

    It does if a reduction reads it, or if it is large. A large result that is stored in a global is written to memory
    in any case, so it may be fused.
    """
    readers = list(readers_of(result))
    if any(map(reduces, readers)):
        return True
    return size_of(result) > LARGEST and not any(reader.name == STORE for reader in readers)


PASS = FuseElementwise
