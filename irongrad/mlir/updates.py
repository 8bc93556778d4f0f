"""Values of the dialect flow that an operation updates in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iree.compiler import ir

UPDATE, KERNEL, VIEW = "flow.tensor.update", "flow.dispatch", "flow.tensor.reshape"
_TIED = "tied_operands"


def targets_of(operation: Any) -> Iterator[Any]:
    """The values that an operation updates: the target of an update, and the tied operands of a kernel."""
    if operation.name == UPDATE:
        yield operation.operands[0]
    elif operation.name == KERNEL and _TIED in operation.attributes:
        workload, *_ = ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"])
        tied = [ir.IntegerAttr(t).value for t in ir.ArrayAttr(operation.attributes[_TIED])]
        yield from (operation.operands[workload + place] for place in tied if place >= 0)


def viewed(value: Any) -> Any:
    """The value that `value` is a view of; `value` itself if it is none."""
    while not isinstance(value.owner, ir.Block) and value.owner.name == VIEW:
        value = value.owner.operands[0]
    return value
