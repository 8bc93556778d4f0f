"""Barriers that hold a value where it is: nothing of IREE's moves or fuses what computes it with what reads it.

They are for the phase `flow`, which says what is a kernel, and are dropped behind it, as IREE 3.13.0 frees no memory
that is behind a barrier and ends a command buffer at each. Others that a module has stay.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

BARRIER = "util.optimization_barrier"
MARK = "irongrad.held"
_GRADIENT = "irongrad.gradient"


def hold(value: Any, place: ir.InsertionPoint) -> Any:
    """`value` behind a barrier at `place`, in the value's own context."""
    with ir.Location.unknown(value.context), place:
        return ir.Operation.create(BARRIER, [value.type], [value], {MARK: ir.UnitAttr.get()}).result


def gradient_line(result: str, value: str, kind: str) -> str:
    """A line of MLIR that holds the gradient `value`, of type `kind`, and names it `result`."""
    return f"{result} = {BARRIER} {{{MARK}, {_GRADIENT}}} {value} : {kind}"


def is_gradient(operation: Any) -> bool:
    """Whether an operation is what `gradient_line` says."""
    return operation.name == BARRIER and _GRADIENT in operation.attributes


def hold_behind(result: Any) -> Any:
    """Have all that reads the result of an operation read it behind a barrier; that barrier's result."""
    held = hold(result, ir.InsertionPoint.after(result.owner))
    result.replace_all_uses_except(held, held.owner.operation)
    return held


def release(held: Any) -> None:
    """Have what reads a value behind a barrier read the value itself."""
    barrier = held.owner
    held.replace_all_uses_with(barrier.operands[0])
    barrier.erase()
