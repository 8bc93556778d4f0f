"""Operands of products that stay the same over a loop, packed before it.

With data tiling IREE 3.13.0 packs each operand of a product where the product is. Of the weights of a recurrent layer
that is once an iteration: without, an LSTM of two layers of 128 units over 32 steps takes 0.85 of the time.
tests/pipeline/test_sequences.py tells when it no longer does.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.pipeline.operations import LOOPS, around, block_of, functions_of, inside

_PACKING = "flow.tensor.encode"


def pack_before_loops(module: ir.Module) -> None:
    """Move what packs an operand out of the loops over which the operand stays the same.

    Args:
        module: as it is after IREE's phase `flow`, in its own context.
    """
    for function in functions_of(module):
        for operation in [op for op in inside(function) if op.name == _PACKING]:
            loop = _outermost(operation)
            if loop is not None:
                operation.move_before(loop)


def _outermost(operation: Any) -> Any | None:
    """The outermost loop around an operation whose operands are all from around that loop."""
    loops = [op for op in around(operation.block) if op.name in LOOPS]
    return next((loop for loop in reversed(loops) if not _reads_from_inside(operation, loop)), None)


def _reads_from_inside(operation: Any, loop: Any) -> bool:
    return any(loop in around(block_of(value)) for value in operation.operands)
