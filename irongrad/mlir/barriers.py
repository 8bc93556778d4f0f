"""Barriers that hold a value in place: IREE neither moves its producer nor fuses the producer with a reader.

Barriers act up to the phase `flow`, where IREE forms kernels. A pass drops them after that phase: IREE 3.13.0 frees no
memory behind a barrier, and ends a command buffer at each barrier. Barriers without the mark `MARK` stay.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

BARRIER = "util.optimization_barrier"
MARK = "irongrad.held"
_GRADIENT = "irongrad.gradient"


def hold(value: Any, place: ir.InsertionPoint) -> Any:
    """Put `value` behind a barrier at `place`, in the value's own context; return the barrier's result."""
    with ir.Location.unknown(value.context), place:
        return ir.Operation.create(BARRIER, [value.type], [value], {MARK: ir.UnitAttr.get()}).result


def gradient_line(result: str, value: str, kind: str) -> str:
    """A line of MLIR that puts the gradient `value`, of type `kind`, behind a barrier, as `result`."""
    return f"{result} = {BARRIER} {{{MARK}, {_GRADIENT}}} {value} : {kind}"


def is_gradient(operation: Any) -> bool:
    """Whether an operation is a barrier written by `gradient_line`."""
    return operation.name == BARRIER and _GRADIENT in operation.attributes


def hold_behind(result: Any) -> Any:
    """Put a barrier behind `result`, an operation's result, and redirect its users; return the barrier's result."""
    held = hold(result, ir.InsertionPoint.after(result.owner))
    result.replace_all_uses_except(held, held.owner.operation)
    return held


def release(held: Any) -> None:
    """Erase the barrier with the result `held`; its users read the barrier's operand instead."""
    barrier = held.owner
    held.replace_all_uses_with(barrier.operands[0])
    barrier.erase()
