"""Operands of products that stay the same over a loop, packed before it.

With data tiling IREE 3.13.0 packs each operand of a product where the product is. Of the weights of a recurrent layer
that is once an iteration; packed before it, an LSTM of two layers of 128 units over 32 steps takes 0.85 of the time.
tests/passes/module/test_hoist_lookups.py tells when it no longer does.
"""

from __future__ import annotations

from iree.compiler import ir

from irongrad.mlir.walk import PACKING, found_in, outside_loops


def pack_before_loops(module: ir.Module) -> None:
    """Move what packs an operand out of the loops over which the operand stays the same.

    Args:
        module: as it is after IREE's phase `flow`, in its own context.
    """
    for operation in found_in(module, PACKING):
        place = outside_loops(operation, operation.operands)
        if place is not operation:
            operation.move_before(place)
