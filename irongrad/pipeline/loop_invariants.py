"""Operands of products that stay the same over a loop, packed before it.

With data tiling IREE 3.13.0 packs each operand of a product where the product is. Of the weights of a recurrent layer
that is once an iteration; packed before it, an LSTM of two layers of 128 units over 32 steps takes 0.85 of the time.
tests/pipeline/test_sequences.py tells when it no longer does.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.pipeline.operations import PACKING, around, block_of, found_in, loops_around


def pack_before_loops(module: ir.Module) -> None:
    """Move what packs an operand out of the loops over which the operand stays the same.

    Args:
        module: as it is after IREE's phase `flow`, in its own context.
    """
    for operation in found_in(module, PACKING):
        loop = _outermost(operation)
        if loop is not None:
            operation.move_before(loop)


def _outermost(operation: Any) -> Any | None:
    """The outermost loop around an operation whose operands are all from around that loop."""
    outwards = loops_around(operation.block)
    return next((loop for loop in reversed(outwards) if not _reads_from_inside(operation, loop)), None)


def _reads_from_inside(operation: Any, loop: Any) -> bool:
    return any(loop in around(block_of(value)) for value in operation.operands)
