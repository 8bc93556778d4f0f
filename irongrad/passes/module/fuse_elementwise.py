"""Elementwise operations of linalg made one where they read the same and are for several readers.

What several read is a kernel of its own, unless IREE's pass FuseMultiUseElementwiseProducer makes it one with a reader.
In its phase `flow` IREE 3.13.0 runs it twice (DispatchCreation/Passes.cpp), and each time a producer goes to its first
reader alone, so of the chains that a recurrent layer and its gradients are, or that Adam is, several kernels are left.
Run as often as they are long, it leaves one: a step of the medium LSTM launches 177 kernels in place of 248
(docs/benchmarks.md). tests/passes/module/test_fuse_elementwise.py tells when IREE does that itself.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir, passmanager

from irongrad.memory_model.fusion_limits import LARGEST, ROUNDS
from irongrad.mlir.barriers import hold_behind, release
from irongrad.mlir.linalg import is_elementwise, readers_of, reduces, size_of
from irongrad.mlir.walk import STORE, inside
from irongrad.runtime.errors import InternalError

# IREE's own order: first what one operation alone reads.
_FUSE = "iree-dispatch-creation-elementwise-op-fusion,iree-flow-canonicalize,cse"
_FUSE_FOR_SEVERAL = f"iree-dispatch-creation-fuse-multi-use-elementwise-producer{{num-iterations={ROUNDS}}}"


def fuse_elementwise(module: ir.Module) -> None:
    """Make elementwise operations one that read the same.

    What a reduction reads is left to IREE, which computes that in the reduction's kernel.

    Args:
        module: as it is after IREE's phase `global-optimization`, in its own context. Passes of that phase take
            operations of several results for such of one, and make invalid ones of them.

    Raises:
        InternalError: IREE's passes fail.
    """
    _run(_FUSE, module)
    found = [result for op in inside(module.operation) if is_elementwise(op) for result in op.results]
    held = [hold_behind(result) for result in found if _is_for_others(result)]
    _run(_FUSE_FOR_SEVERAL, module)
    for value in held:
        release(value)


def _run(passes: str, module: ir.Module) -> None:
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module(util.func({passes}))")
        manager.enable_verifier(False)
        try:
            manager.run(module.operation)
        except ir.MLIRError as error:
            raise InternalError(f"IREE's passes {passes} fail: {error}") from error


def _is_for_others(result: Any) -> bool:
    """Whether what reads the result of an elementwise operation had better not compute it.

    What is stored becomes a part of the state, and is written in any case.
    """
    readers = list(readers_of(result))
    if any(map(reduces, readers)):
        return True
    return size_of(result) > LARGEST and not any(reader.name == STORE for reader in readers)
