"""The peak memory for intermediate values of a compiled module's functions, from IREE's own allocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import constant_of, functions_of, inside_block, name_of

_TRANSIENT = "!stream.resource<transient>"


def transients_of(stream: ir.Module) -> dict[str, int]:
    """The peak transient memory of each public function, in bytes, of a module compiled to the stream phase.

    The peak counts allocations of the lifetime `transient` and of static size. These hold values that a function drops,
    and values that one of its submissions hands to the next. Allocations of called functions are added. State,
    arguments and results do not count. Of two branches, the larger one counts. Loop-carried values count twice: once as
    an iteration reads them, and once as it writes them.
    """
    functions = {name_of(f): f for f in functions_of(stream)}
    return {n: peak for n, f in functions.items() if _is_public(f) and (peak := _peak_of(f, functions))}


def _is_public(function: Any) -> bool:
    attributes = function.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value == "public"


def _peak_of(function: Any, functions: Mapping[str, Any]) -> int:
    """The peak of allocated bytes over all paths through the blocks of `function`.

    A block comes after its predecessors, except for the first block of a loop, which also follows the last one.
    """
    blocks = [block for region in function.regions for block in region]
    before, peak, left = ([0] * len(blocks) for _ in range(3))  # by block: bytes held before it, at its peak, after it
    for index, block in enumerate(blocks):
        earlier = [blocks.index(b) for b in block.predecessors]
        before[index] = max((left[b] for b in earlier if b < index), default=0)
        peak[index], left[index] = _peak_in_block(block, before[index], functions)
        for first in (blocks.index(s) for s in block.successors):
            if first <= index:
                handed_on = max(0, left[index] - before[first])
                left[first] = max(left[first], left[index])
                peak[first : index + 1] = [m + handed_on for m in peak[first : index + 1]]
    return max(peak, default=0)


def _peak_in_block(block: Any, now: int, functions: Mapping[str, Any]) -> tuple[int, int]:
    """The peak bytes in `block`, and the bytes held after it, if `now` bytes are held before it."""
    peak = now
    for operation in inside_block(block):
        if operation.name == "stream.resource.alloca" and str(operation.results[0].type) == _TRANSIENT:
            now += constant_of(operation.operands[0]) or 0
            peak = max(peak, now)
        elif operation.name == "stream.resource.dealloca" and str(operation.operands[0].type) == _TRANSIENT:
            now -= constant_of(operation.operands[1]) or min(_sizes(operation.operands[0]), default=0)
        elif operation.name == "util.call":
            called = functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            peak = max(peak, now + _peak_of(called, functions))
    return peak, now


def _sizes(resource: Any) -> set[int]:
    """The sizes of all allocations that may reach `resource` through loops and branches."""
    found: set[int] = set()
    seen, stack = [resource], [resource]
    while stack:
        value = stack.pop()
        if isinstance(value.owner, ir.Block):
            passed = [v for v in _incoming_values(ir.BlockArgument(value)) if v not in seen]
            seen += passed
            stack += passed
        elif value.owner.name == "stream.resource.alloca":
            found.add(constant_of(value.owner.operands[0]) or 0)
    return found


def _incoming_values(argument: Any) -> Iterator[Any]:
    """The values that the predecessors of a block pass as its argument `argument`."""
    for block in argument.owner.predecessors:
        end = block.operations[len(block.operations) - 1].operation
        operands = list(end.operands)
        for successor in reversed(list(end.successors)):  # operands for the successors come last, in order
            own = len(successor.arguments)
            operands, passed = operands[: len(operands) - own], operands[len(operands) - own :]
            if successor == argument.owner:
                yield passed[argument.arg_number]
