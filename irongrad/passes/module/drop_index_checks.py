"""The checks that torch-mlir puts inside a gather go."""

from __future__ import annotations

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC
from irongrad.mlir.walk import inside


def _drop_checks(functions: ir.Module) -> None:
    """Leave out what torch-mlir 20261001 checks inside a gather's loops: that each index is one.

    IREE 3.13.0 runs no such check, as devices cannot fail, but takes the gather's loops apart for it, and a kernel more
    computes its indices. Those that a user gives are checked by the entry points.
    """
    loops = [op for op in inside(functions.operation) if op.name == GENERIC]
    for check in [op for loop in loops for op in inside(loop) if op.name == "cf.assert"]:
        check.erase()
