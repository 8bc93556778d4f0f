"""Where in memory a function's intermediate values lie.

IREE 3.13.0 places what is there at different times in one allocation, value after value in the order in which they are
first written (compiler/src/iree/compiler/Dialect/Stream/Transforms/LayoutSlices.cpp). Where a step's values differ in
size that leaves gaps: of the medium LSTM's 6.2 MB only 4.5 are ever in use, and which they are hangs on details that no
prediction has. Here the largest are placed first, which mostly wastes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iree.compiler import ir

from irongrad.memory_model.placement import Span, most_at_once, place
from irongrad.mlir.stream import LARGEST_ALLOCATION
from irongrad.mlir.walk import constant_of, found_in, functions_of, inside

_PACK = "stream.resource.pack"
_ALLOCATION = "stream.resource.alloca"
_PART = "stream.resource.subview"
_TRANSIENT = "!stream.resource<transient>"
_MOMENTS = "lifetime_intervals"  # the first and the last of each value, one after the other


def lay_out(module: ir.Module, alignment: int) -> None:
    """Place the intermediate values of a module, in place.

    Args:
        module: as it is after IREE's pass `iree-stream-schedule-allocation`, in its own context.
        alignment: of which number of bytes every place has to be a multiple.
    """
    for pack in found_in(module, _PACK):
        spans = list(_spans(pack))
        if len(spans) < len(pack.results) - 1:
            continue  # an offset, or sizes that are not known
        if not most_at_once(spans) < sum(s.bytes for s in spans):
            continue  # all are there at the same time
        placement = place(spans, alignment)
        if placement.total > LARGEST_ALLOCATION:
            continue
        _replace(pack, (placement.total, *placement.offsets))


def allocate_apart(module: ir.Module) -> None:
    """Give values that outlive a submission an allocation each, in functions with loops or branches, in place.

    IREE 3.13.0 allocates all that a submission hands on to later ones at once, and frees it when the last of it has
    been read; where a loop begins with one of them, never.

    Args:
        module: as `lay_out` takes it.
    """
    for function in functions_of(module):
        operations = list(inside(function))
        if any(op.name.startswith("scf.") and len(op.results) for op in operations):
            for allocation in list(filter(_is_shared, operations)):  # before any of the operations is erased
                _allocate_each(allocation)


def _is_shared(operation: Any) -> bool:
    """Whether an operation allocates transient values that are all there at the same time."""
    if operation.name != _ALLOCATION or str(operation.results[0].type) != _TRANSIENT:
        return False
    size = operation.operands[0].owner
    if getattr(size, "name", "") != _PACK or any(s.start or s.end for s in _spans(size)):
        return False
    return all(use.owner.name == _PART for use in operation.results[0].uses)


def _allocate_each(allocation: Any) -> None:
    memory, ready = allocation.results
    values = [use.owner for use in memory.uses]
    with allocation.location, ir.InsertionPoint(allocation):
        each = [allocation.clone() for _ in values]
        timepoints = [one.results[1] for one in each]
        ready.replace_all_uses_with(ir.Operation.create("stream.timepoint.join", [ready.type], timepoints).result)
    for value, one in zip(values, each, strict=True):
        *_, one.operands[0] = value.operands
        value.results[0].replace_all_uses_with(one.results[0])
        value.erase()
    allocation.erase()


def _spans(pack: Any) -> Iterator[Span]:
    """What `pack` places, as far as sizes are known."""
    moments = [ir.IntegerAttr(a).value for a in ir.ArrayAttr(pack.attributes[_MOMENTS])]
    if len(pack.operands) == len(pack.results) - 1:
        for size, start, end in zip(pack.operands, moments[::2], moments[1::2], strict=True):
            if (known := constant_of(size)) is not None:
                yield Span(known, start, end)


def _replace(operation: Any, values: tuple[int, ...]) -> None:
    """Have constants stand for the results of `operation`."""
    with operation.location, ir.InsertionPoint(operation):
        index = ir.IndexType.get()
        for result, value in zip(operation.results, values, strict=True):
            constant = ir.Operation.create(
                "arith.constant", results=[index], attributes={"value": ir.IntegerAttr.get(index, value)}
            )
            result.replace_all_uses_with(constant.result)
    operation.erase()
