"""The barriers that kept gradients apart go before IREE plans memory."""

from __future__ import annotations

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER, MARK, release
from irongrad.mlir.walk import inside


def drop_barriers(module: ir.Module) -> None:
    """Release all values of a module that are held.

    Args:
        module: in its own context.
    """
    for barrier in [op for op in inside(module.operation) if op.name == BARRIER and MARK in op.attributes]:
        release(barrier.results[0])
