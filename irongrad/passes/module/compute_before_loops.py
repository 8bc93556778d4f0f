"""Have IREE compute what a loop begins with before the loop, although kernels after the loop read it too.

IREE 3.13.0 schedules a value with its readers. If one of them lies after a loop, the kernel that the loop begins with
may go there, too: "circular dependency: input operation uses partition output". The reader may be after the loop
itself, or before it with readers of its own only after it. `torch.linalg.solve(1 - a, 1 + a)` is such a program, and so
is the inverse of a matrix beside its determinant. tests/passes/module/test_compute_before_loops.py tells when it is
fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Put barriers between a loop and what it begins with, and what depends on that, if it is read after the loop.

    Before:
        %a = stream.tensor.dispatch @k(%x); %b = stream.tensor.dispatch @m(%a)
        %r = scf.for iter_args(%i = %a) { ... }
        stream.tensor.dispatch @n(%a, %b, %r)
    After:
        %a = stream.tensor.dispatch @k(%x); %b = stream.tensor.dispatch @m(%a); %held = util.optimization_barrier %b
        %r = scf.for iter_args(%i = %a) { ... }
        %read = util.optimization_barrier %a; stream.tensor.dispatch @n(%read, %held, %r)
    """

    name: ClassVar[str] = "compute-before-loops"
    required: ClassVar[str] = "IREE schedules what a loop begins with after the loop, with a kernel that reads it there"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        held = 0
        for function in functions_of(module):
            for loop in [op for op in inside(function) if op.name.startswith(_CONTROL) and len(op.results)]:
                held += _hold_before(loop) + _hold_behind(loop)
        return PassResult(held > 0, {"held": held})


def _hold_before(loop: Any) -> int:
    """Put barriers behind the values of the loop's block that are read only after it; return how many."""
    places = _places_around(loop)
    first = places[loop]
    begins = {owner_of(v) for v in _beginning(loop, places)}
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
                _hold([(use.owner, use.operand_number) for use in result.uses], result, ir.InsertionPoint(loop))
                held += 1
    return held


def _hold_behind(loop: Any) -> int:
    """Put barriers between what a loop begins with and the kernels after the loop that read it; return how many.

    They are after the loop, where the value is read last: the loop must not overwrite it.
    """
    places = _places_around(loop)
    held = 0
    for value in _beginning(loop, places):
        uses = [(use.owner, use.operand_number) for use in value.uses]
        later = [
            (user, number)
            for user, number in uses
            if user.name.startswith(_STREAM) and places.get(user.operation, -1) > places[loop]
        ]
        if later:
            _hold(later, value, ir.InsertionPoint.after(loop))
            held += 1
    return held


def _places_around(loop: Any) -> dict[Any, int]:
    """The operations of the block of a loop, each with its place."""
    return {op.operation: place for place, op in enumerate(loop.block)}


def _beginning(loop: Any, places: Mapping[Any, int]) -> list[Any]:
    """The values of the loop's block with which the loop begins, and which kernels or copies compute."""
    owners = {v: owner_of(v) for v in loop.operands}
    return [v for v, owner in owners.items() if owner in places and owner.name.startswith(_STREAM)]


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


def _hold(uses: Sequence[tuple[Any, int]], value: Any, place: ir.InsertionPoint) -> None:
    """Put `value` behind a barrier at `place` for these uses of it."""
    with value.owner.location, place:
        held = ir.Operation.create(BARRIER, [value.type], [value]).result
    for user, number in uses:
        user.operands[number] = held


PASS = ComputeBeforeLoops
