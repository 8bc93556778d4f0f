"""Loops that write what they carry where it lies.

IREE 3.13.0 copies every value that a loop carries, once an iteration: a loop's arguments have no affinity for it, so a
`stream.async.transfer` brings each to the device that it is on. Without those its analysis of last uses
(compiler/src/iree/compiler/Dialect/Stream/Transforms/ElideAsyncCopies.cpp) finds what may be written in place. It holds
for one run of a loop's body; what it has wrong over several, and where one value has two names, is kept from it here.
tests/passes/module/test_loops_in_place.py tells when either is mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import BOUNDS, around, block_of, functions_of, inside, loops_around
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_LOOP = "scf.for"
_TRANSFER = "stream.async.transfer"

# Values that may be made as often as they are needed.
_MADE_ANEW = frozenset({"stream.tensor.empty", "stream.tensor.splat"})

# Operations whose results are memory that nothing else is.
_COMPUTED, _GIVEN = "stream.tensor.", "stream.tensor.import"


@dataclass(frozen=True)
class LoopsInPlace(ModulePass):
    """Have loops update in place the values that they carry.

    Before:
        scf.for %t iter_args(%h = %h0) { %copy = stream.async.transfer %h; %new = stream.tensor.dispatch @step(%copy) }
    After:
        scf.for %t iter_args(%h = %h0) { %new = stream.tensor.dispatch @step(%h) }

    A value keeps its copy if it may be aliased, or if it is made outside the loop and overwritten inside.
    """

    name: ClassVar[str] = "loops-in-place"
    required: ClassVar[str] = "IREE overwrites values from around a loop in each iteration"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        dropped = copied = 0
        for function in functions_of(module):
            for loop in [op for op in inside(function) if op.name == _LOOP]:
                for place in range(BOUNDS, len(loop.operands)):
                    _make_anew(loop, place)
                    if _is_its_own(loop, place):
                        dropped += _drop_transfers(loop.regions[0].blocks[0].arguments[place - BOUNDS + 1])
            for operation in list(inside(function)):
                copied += _copy_what_is_around(operation)
        return PassResult(dropped + copied > 0, {"dropped": dropped, "copied": copied})


def _make_anew(loop: Any, place: int) -> None:
    """Have a loop begin with its own empty or uniform value: one that something else reads cannot be written."""
    value = loop.operands[place]
    if _is_made_anew(value):
        loop.operands[place] = _again(value, loop)


def _is_made_anew(value: Any) -> bool:
    return getattr(value.owner, "name", "") in _MADE_ANEW


def _again(value: Any, before: Any) -> Any:
    return value.owner.clone(ir.InsertionPoint(before)).results[0]


def _is_its_own(loop: Any, place: int) -> bool:
    """Whether a loop begins with a value that nothing else is, and that is computed each time before the loop runs.

    IREE 3.13.0 lets a loop write to both of two arguments that begin with one value, and a loop in a loop to a value
    from around both, which the next iteration of the outer one would find changed. What a function is given, a part of
    the state, and what a branch hands on may be memory that has another name besides.
    """
    value = loop.operands[place]
    if not getattr(value.owner, "name", "").startswith(_COMPUTED) or value.owner.name == _GIVEN:
        return False
    return list(loop.operands).count(value) == 1 and block_of(value) == loop.block


def _drop_transfers(argument: Any) -> int:
    dropped = 0
    for use in list(argument.uses):
        transfer = use.owner
        if transfer.name == _TRANSFER and transfer.results[0].type == argument.type:
            transfer.results[0].replace_all_uses_with(argument)
            transfer.erase()
            dropped += 1
    return dropped


def _copy_what_is_around(operation: Any) -> int:
    """Have an operation in a loop that overwrites a value from around the loop overwrite a copy.

    IREE 3.13.0 takes the operation for the last that reads the value, and overwrites it in each iteration.
    """
    loop = next(iter(loops_around(operation.block)), None)
    copied = 0
    for place in _overwritten(operation) if loop is not None else ():
        value = operation.operands[place]
        if loop not in around(block_of(value)):
            operation.operands[place] = _copied(value, operation)
            copied += 1
    return copied


def _copied(value: Any, before: Any) -> Any:
    """A copy of `value`, made right before an operation: IREE 3.13.0 leaves no transfer of unknown affinity out."""
    if _is_made_anew(value):
        return _again(value, before)
    affinity = {"target_affinity": before.attributes["affinity"]}
    with before.location, ir.InsertionPoint(before):
        size = ir.Operation.create("stream.resource.size", [ir.IndexType.get()], [value]).result
        return ir.Operation.create(_TRANSFER, [value.type], [value, size, size], affinity).result


def _overwritten(operation: Any) -> Iterator[int]:
    """The places of the operands that an operation overwrites."""
    if operation.name == "stream.tensor.update":
        yield 0
    elif operation.name == "stream.tensor.dispatch" and "tied_operands" in operation.attributes:
        workload, *_ = ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"])
        tied = [ir.IntegerAttr(t).value for t in ir.ArrayAttr(operation.attributes["tied_operands"])]
        yield from (workload + place for place in tied if place >= 0)


PASS = LoopsInPlace
