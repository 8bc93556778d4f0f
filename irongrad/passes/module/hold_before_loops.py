"""Compute a value before a loop in a kernel that does not pack it for a product of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, producer_of
from irongrad.mlir.walk import LOOPS, around, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

_READERS = PRODUCTS | {"tensor.extract_slice"}


@dataclass(frozen=True)
class HoldBeforeLoops(ModulePass):
    """Put a barrier behind what is computed before a loop, if a kernel of any size in the loop reads it.

    Before:
        %b = linalg.generic ...; scf.for %t { %s = tensor.extract_slice %b[%t, 0, 0] ...; linalg.generic ins(%s, %h) }
    After:
        %b = linalg.generic ...; %held = util.optimization_barrier %b
        scf.for %t { %s = tensor.extract_slice %held[%t, 0, 0] ...; linalg.generic ins(%s, %h) }

    IREE 3.13.0 computes a slice where it is read, so %b in the loop. It gives what is added to a product the layout of
    the product's tiles, and moves that into the kernel that computes it, also out of the loop. The layout names the
    product's unknown sizes, which are computed in the loop, and so the pass fails and says nothing
    (DispatchCreation/FuseEncodingOpsIntoDispatchRegions.cpp).
    tests/passes/module/test_hold_before_loops.py tells when it does not.
    """

    name: ClassVar[str] = "hold-before-loops"
    required: ClassVar[str] = "the module may not compile without it"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling; without it, tensors have no such layouts."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        held: dict[Any, Any] = {}
        for loop in [op for op in inside(module.operation) if op.name in LOOPS]:
            for reader in [op for op in inside(loop) if _has_any_size(op)]:
                for place, value in enumerate(reader.operands):
                    if _is_computed_before(value, loop):
                        if value not in held:
                            held[value] = hold(value, ir.InsertionPoint.after(value.owner))
                        reader.operands[place] = held[value]
        return PassResult(bool(held), {"held": len(held)})


def _has_any_size(operation: Any) -> bool:
    """Whether an operation is a product, elementwise or a slice, with a result of a size known at run time alone."""
    if operation.name not in _READERS and not is_elementwise(operation):
        return False
    return not operation.results[0].type.has_static_shape


def _is_computed_before(value: Any, loop: Any) -> bool:
    """Whether an elementwise operation with operands computes `value` outside of `loop`."""
    if producer_of(value) is None or not is_elementwise(value.owner) or not inputs_of(value.owner):
        return False
    return loop not in around(value.owner.operation.block)


PASS = HoldBeforeLoops
