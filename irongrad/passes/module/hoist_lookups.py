"""What a loop looks up in a table by rows, looked up before the loop.

IREE 3.13.0 moves a row's slice in front of what computes the elements of all rows, and computes each row in the
iteration that reads it: a lookup in a table within the product that the iteration makes, element by element, on packed
operands. An LSTM whose first layer looks its inputs up then takes two to three times as long.
tests/passes/module/test_hoist_lookups.py tells when it no longer does. Other rows cost as much in the loop as before
it, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import GENERIC, RESHAPES, is_elementwise
from irongrad.mlir.walk import around, block_of, inside, loops_around

_SLICE, _LOOKUP = "tensor.extract_slice", "tensor.extract"


def look_up_before_loops(functions: ir.Module) -> None:
    """Have loops read rows that were looked up before they run.

    Args:
        functions: as torch-mlir makes them, in linalg; changed in place, in their own context.
    """
    for operation in [op for op in inside(functions.operation) if op.name == _SLICE]:
        rows = operation.operands[0]
        loop = next(iter(loops_around(operation.block)), None)
        if loop is not None and loop not in around(block_of(rows)) and any(map(_is_lookup, _computing(rows))):
            operation.operands[0] = hold(rows, ir.InsertionPoint(loop))


def _computing(value: Any) -> Iterator[Any]:
    """The operations that IREE may move into a loop which reads a part of `value`: each element is of its own."""
    waiting, seen = [value], set()
    while waiting:
        owner = waiting.pop().owner
        if isinstance(owner, ir.Block) or owner.operation in seen:
            continue
        if owner.name not in RESHAPES and not is_elementwise(owner.operation):
            continue
        seen.add(owner.operation)
        yield owner.operation
        waiting += owner.operation.operands


def _is_lookup(operation: Any) -> bool:
    """Whether an operation reads a table at places that data says."""
    if operation.name != GENERIC:
        return False
    lookups = [op for op in inside(operation) if op.name == _LOOKUP]
    return any(_is_of_data(place) for op in lookups for place in list(op.operands)[1:])


def _is_of_data(place: Any) -> bool:
    """Whether an index depends on elements, which are what the body of an operation is given."""
    if isinstance(place.owner, ir.Block):
        return True
    return any(map(_is_of_data, place.owner.operation.operands))
