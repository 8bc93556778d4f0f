"""Barriers that hold a value in place: IREE neither moves its producer nor fuses the producer with a reader.

Barriers act up to the phase `flow`, where IREE forms kernels. A pass drops them after that phase: IREE 3.13.0 frees no
memory behind a barrier, and ends a command buffer at each barrier. Barriers without the mark `MARK` stay.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.transposes import unknown_sizes

BARRIER = "util.optimization_barrier"
MARK = "irongrad.held"
_TIE = "flow.tensor.tie_shape"
_GRADIENT = "irongrad.gradient"


def hold(value: Any, place: ir.InsertionPoint) -> Any:
    """Put `value` behind a barrier at `place`, in the value's own context; return what stands for it from there on."""
    with ir.Location.unknown(value.context), place:
        held = ir.Operation.create(BARRIER, [value.type], [value], {MARK: ir.UnitAttr.get()}).result
        sizes = _sizes(value)
        return ir.Operation.create(_TIE, [value.type], [held, *sizes]).result if sizes else held


def _sizes(value: Any) -> list[Any]:
    """The sizes of a tensor that are known at run time alone.

    IREE 3.13.0 does not find them through a barrier: "'tensor.dim' op unexpected during shape cleanup". Test:
    tests/mlir/test_barriers.py::test_iree_still_loses_sizes_behind_a_barrier.
    """
    return unknown_sizes(value)


def gradient_line(result: str, value: str, kind: str) -> str:
    """A line of MLIR that puts the gradient `value`, of type `kind`, behind a barrier, as `result`."""
    return f"{result} = {BARRIER} {{{MARK}, {_GRADIENT}}} {value} : {kind}"


def held_line(result: str, value: str, kind: str) -> str:
    """A line of MLIR that puts `value`, of type `kind`, behind a barrier, as `result`."""
    return f"{result} = {BARRIER} {{{MARK}}} {value} : {kind}"


def is_gradient(operation: Any) -> bool:
    """Whether an operation is a barrier written by `gradient_line`."""
    return operation.name == BARRIER and _GRADIENT in operation.attributes


def hold_behind(result: Any) -> Any:
    """Put a barrier behind `result`, an operation's result, and redirect its users; return what they read instead."""
    uses = [(use.owner, use.operand_number) for use in result.uses]
    held = hold(result, ir.InsertionPoint.after(result.owner))
    for user, place in uses:
        user.operands[place] = held
    return held


def release(held: Any) -> None:
    """Erase the barrier with the result `held`; its users read the barrier's operand instead."""
    tie = held.owner if held.owner.name == _TIE else None
    barrier = (tie.operands[0] if tie is not None else held).owner
    held.replace_all_uses_with(barrier.operands[0])
    for operation in (tie, barrier):
        if operation is not None:
            operation.erase()
