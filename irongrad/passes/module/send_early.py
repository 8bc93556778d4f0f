"""Send gradients to the other ranks as soon as they exist, while the rest of the backward runs.

A step's exchanges follow its backward. IREE 3.13.0 ends a command buffer where host code runs between kernels, and what
stands before a call has to be submitted before it. So the position of a call decides what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import found_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_CALL = "util.call"
_BEGIN, _EXCHANGES = "comm.begin", ("comm.allreduce", "comm.reduce")
# What puts a bucket together and hands it over.
_MOVABLE = frozenset(
    {"arith.constant", "flow.tensor.empty", "flow.tensor.reshape", "flow.tensor.update"}
    | {"hal.devices.get", "hal.fence.create", "hal.tensor.barrier", "hal.tensor.export"}
)


@dataclass(frozen=True)
class SendEarly(ModulePass):
    """Move each exchange directly after the last kernel that computes a part of it.

    Before:
        %g1 = flow.dispatch @dw1; %g0 = flow.dispatch @dw0
        util.call @comm.allreduce(%g1); util.call @comm.allreduce(%g0)
    After:
        %g1 = flow.dispatch @dw1; util.call @comm.allreduce(%g1)
        %g0 = flow.dispatch @dw0; util.call @comm.allreduce(%g0)

    The order of the exchanges stays: all ranks have to make the same ones in the same order.
    """

    name: ClassVar[str] = "send-early"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        calls = [op for op in found_in(module, _CALL) if _callee(op) in _EXCHANGES]
        blocks = dict.fromkeys(op.block for op in calls)
        moved = sum(_move(block, [op for op in calls if op.block == block]) for block in blocks)
        return PassResult(moved > 0, {"moved": moved})


def _callee(operation: Any) -> str:
    return str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)


def _move(block: Any, calls: Sequence[Any]) -> int:
    """Move the exchanges of one block, in order; return how many moved past another operation."""
    operations = [op.operation for op in block]
    places = {value: i for i, op in enumerate(operations) for value in op.results}
    sent: set[int] = set()
    begun = (i for i, op in enumerate(operations) if op.name == _CALL and _callee(op) == _BEGIN)
    place, moved = next(begun, 0), 0  # the ranks agree on a step before they exchange a part of it
    after = operations[place]
    for call in calls:
        number = places[call.results[0]]
        needed = _needed(number, operations, places) - sent
        sources = {places.get(o, -1) for i in needed for o in operations[i].operands} - needed - sent
        if max(sources, default=-1) > place:
            place = max(sources)
            after = operations[place]
        mine = sorted(i for i in needed if i > place)  # what stands before is where its other readers need it
        moved += len(mine) < number - place
        for i in mine:
            operations[i].move_after(after)
            after = operations[i]
        sent |= needed
    return moved


def _needed(number: int, operations: Sequence[Any], places: Mapping[Any, int]) -> set[int]:
    """The call at `number`, and what puts its bucket together, by position."""
    found, waiting = {number}, [number]
    while waiting:
        for operand in operations[waiting.pop()].operands:
            i = places.get(operand)
            if i is not None and i not in found and operations[i].name in _MOVABLE:
                found.add(i)
                waiting.append(i)
    return found


PASS = SendEarly
