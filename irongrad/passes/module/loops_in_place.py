"""Let loops update the values that they carry in place.

IREE 3.13.0 copies every carried value once per iteration. It finds no affinity for a loop's arguments, so a
`stream.async.transfer` moves each argument to the device that it is on already. Without the transfers, IREE's analysis
of last uses (compiler/src/iree/compiler/Dialect/Stream/Transforms/ElideAsyncCopies.cpp) finds the values that may be
written in place. The analysis holds for one run of a loop's body. It is wrong over several iterations, and for a value
with two names, so this pass keeps these cases from it. tests/passes/module/test_loops_in_place.py tells when either is
fixed.
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

# Operations that are cheap to repeat, so that each reader can have its own result.
_REPEATABLE = frozenset({"stream.tensor.empty", "stream.tensor.splat"})

# The prefix of operations whose results are unaliased buffers, and the exception to it.
_COMPUTED, _IMPORTED = "stream.tensor.", "stream.tensor.import"


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
                    _repeat_initial_value(loop, place)
                    if _is_unaliased(loop, place):
                        dropped += _drop_transfers(loop.regions[0].blocks[0].arguments[place - BOUNDS + 1])
            for operation in inside(function):
                copied += _copy_outer_values(operation)
        return PassResult(dropped + copied > 0, {"dropped": dropped, "copied": copied})


def _repeat_initial_value(loop: Any, place: int) -> None:
    """Give a loop its own empty or uniform initial value: a value with other readers cannot be overwritten."""
    value = loop.operands[place]
    if _is_repeatable(value):
        loop.operands[place] = _repeated(value, loop)


def _is_repeatable(value: Any) -> bool:
    return getattr(value.owner, "name", "") in _REPEATABLE


def _repeated(value: Any, before: Any) -> Any:
    return value.owner.clone(ir.InsertionPoint(before)).results[0]


def _is_unaliased(loop: Any, place: int) -> bool:
    """Whether a loop's initial value has no alias, and is computed again each time before the loop runs.

    If two arguments have the same initial value, IREE 3.13.0 lets the loop overwrite both. It also lets an inner loop
    overwrite a value from outside both loops, which the next iteration of the outer loop would find changed. Arguments
    of a function, parts of the state and results of branches may be buffers with an alias.
    """
    value = loop.operands[place]
    if not getattr(value.owner, "name", "").startswith(_COMPUTED) or value.owner.name == _IMPORTED:
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


def _copy_outer_values(operation: Any) -> int:
    """Make an operation in a loop overwrite copies of values from outside the loop; return the number of copies.

    IREE 3.13.0 takes the operation for the last reader of the value, and overwrites the value in each iteration.
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
    """Copy `value` directly before an operation, by a transfer of unknown affinity: IREE 3.13.0 never elides one."""
    if _is_repeatable(value):
        return _repeated(value, before)
    affinity = {"target_affinity": before.attributes["affinity"]}
    with before.location, ir.InsertionPoint(before):
        size = ir.Operation.create("stream.resource.size", [ir.IndexType.get()], [value]).result
        return ir.Operation.create(_TRANSFER, [value.type], [value, size, size], affinity).result


def _overwritten(operation: Any) -> Iterator[int]:
    """The indices of the operands that an operation overwrites."""
    if operation.name == "stream.tensor.update":
        yield 0
    elif operation.name == "stream.tensor.dispatch" and "tied_operands" in operation.attributes:
        workload, *_ = ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"])
        tied = [ir.IntegerAttr(t).value for t in ir.ArrayAttr(operation.attributes["tied_operands"])]
        yield from (workload + place for place in tied if place >= 0)


PASS = LoopsInPlace
