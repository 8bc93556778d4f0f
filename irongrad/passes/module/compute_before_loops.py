"""Have IREE compute a value before a loop that it does not need, if both depend on one kernel.

IREE 3.13.0 schedules a value with its first reader. If that lies after a loop, the kernel that the value depends on
goes there, too, although the loop begins with a result of that kernel: "circular dependency: input operation uses
partition output". `torch.linalg.solve(1 - a, 1 + a)` is such a program.
tests/passes/module/test_compute_before_loops.py tells when it is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.walk import functions_of, inside, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_CONTROL, _STREAM = "scf.", "stream."


@dataclass(frozen=True)
class ComputeBeforeLoops(ModulePass):
    """Put a barrier between a value and a loop after which it is read, if the loop begins with what it depends on.

    Before:
        %a = stream.tensor.dispatch @k(%x); %b = stream.tensor.dispatch @m(%a)
        %r = scf.for iter_args(%i = %a) { ... }
        stream.tensor.dispatch @n(%b, %r)
    After:
        %a = stream.tensor.dispatch @k(%x); %b = stream.tensor.dispatch @m(%a); %held = util.optimization_barrier %b
        %r = scf.for iter_args(%i = %a) { ... }
        stream.tensor.dispatch @n(%held, %r)
    """

    name: ClassVar[str] = "compute-before-loops"
    required: ClassVar[str] = "IREE schedules a value after a loop that begins with what the value depends on"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        held = 0
        for function in functions_of(module):
            for loop in [op for op in inside(function) if op.name.startswith(_CONTROL) and len(op.results)]:
                held += _hold_before(loop)
        return PassResult(held > 0, {"held": held})


def _hold_before(loop: Any) -> int:
    """Put barriers behind the values of the loop's block that are read only after it; return how many."""
    places = {op.operation: place for place, op in enumerate(loop.block)}
    first = places[loop]
    begins = {owner_of(v) for v in loop.operands if owner_of(v) in places and owner_of(v).name.startswith(_STREAM)}
    depending: set[Any] = set()  # operations before the loop that depend on what it begins with
    held = 0
    for operation, place in places.items():
        if place >= first:
            break
        if not operation.name.startswith(_STREAM) or not any(
            owner_of(v) in begins | depending for v in operation.operands
        ):
            continue
        depending.add(operation)
        for result in operation.results:
            readers = [_place_of(use.owner, places) for use in result.uses]
            if readers and min(readers) > first:
                _hold(result, loop)
                held += 1
    return held


def _place_of(reader: Any, places: Mapping[Any, int]) -> int:
    """The place of a reader in a block, or of the operation of the block that contains the reader.

    A reader in another block of the function comes after this one.
    """
    operation = reader.operation
    while operation not in places:
        if operation.parent is None:
            return len(places)
        operation = operation.parent.operation
    return places[operation]


def _hold(value: Any, loop: Any) -> None:
    uses = [(use.owner, use.operand_number) for use in value.uses]
    with loop.location, ir.InsertionPoint(loop):
        held = ir.Operation.create(BARRIER, [value.type], [value]).result
    for user, place in uses:
        user.operands[place] = held


PASS = ComputeBeforeLoops
