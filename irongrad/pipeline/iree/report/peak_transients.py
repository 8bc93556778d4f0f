"""How much memory the functions of a compiled module take for intermediate values, from IREE's own allocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import constant_of, functions_of, inside_block, name_of

_TRANSIENT = "!stream.resource<transient>"


def transients_of(stream: ir.Module) -> dict[str, int]:
    """The most bytes that each public function holds at once, of a module that was compiled to the stream phase.

    Counted are allocations of the lifetime `transient`, of static size: what a function computes and drops, or hands
    from one of its submissions to the next, and what the functions that it calls hold besides. The state, arguments and
    results are none of them. Of two branches the larger counts. A loop holds what one iteration hands to the next
    twice: as it is read, and as it is written.
    """
    functions = {name_of(f): f for f in functions_of(stream)}
    return {n: most for n, f in functions.items() if _is_public(f) and (most := _most(f, functions))}


def _is_public(function: Any) -> bool:
    attributes = function.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value == "public"


def _most(function: Any, functions: Mapping[str, Any]) -> int:
    """The most bytes between allocations and deallocations on any way through the blocks of `function`.

    A block comes after those that lead to it, but for the last of a loop, which leads back to its first.
    """
    blocks = [block for region in function.regions for block in region]
    before, most, left = ([0] * len(blocks) for _ in range(3))  # by block: what is there before, at most, and after it
    for index, block in enumerate(blocks):
        earlier = [blocks.index(b) for b in block.predecessors]
        before[index] = max((left[b] for b in earlier if b < index), default=0)
        most[index], left[index] = _through(block, before[index], functions)
        for first in (blocks.index(s) for s in block.successors):
            if first <= index:
                handed_on = max(0, left[index] - before[first])
                left[first] = max(left[first], left[index])
                most[first : index + 1] = [m + handed_on for m in most[first : index + 1]]
    return max(most, default=0)


def _through(block: Any, now: int, functions: Mapping[str, Any]) -> tuple[int, int]:
    """The most bytes in `block`, and what is left after it, where there are `now` before it."""
    most = now
    for operation in inside_block(block):
        if operation.name == "stream.resource.alloca" and str(operation.results[0].type) == _TRANSIENT:
            now += constant_of(operation.operands[0]) or 0
            most = max(most, now)
        elif operation.name == "stream.resource.dealloca" and str(operation.operands[0].type) == _TRANSIENT:
            now -= constant_of(operation.operands[1]) or min(_sizes(operation.operands[0]), default=0)
        elif operation.name == "util.call":
            called = functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            most = max(most, now + _most(called, functions))
    return most, now


def _sizes(resource: Any) -> set[int]:
    """The sizes of the allocations that may be `resource`, which loops and branches hand on."""
    found: set[int] = set()
    seen, stack = [resource], [resource]
    while stack:
        value = stack.pop()
        if isinstance(value.owner, ir.Block):
            handed = [v for v in _handed_to(ir.BlockArgument(value)) if v not in seen]
            seen += handed
            stack += handed
        elif value.owner.name == "stream.resource.alloca":
            found.add(constant_of(value.owner.operands[0]) or 0)
    return found


def _handed_to(argument: Any) -> Iterator[Any]:
    """What the blocks before that of `argument` hand on as it."""
    for block in argument.owner.predecessors:
        end = block.operations[len(block.operations) - 1].operation
        given = list(end.operands)
        for successor in reversed(list(end.successors)):  # their arguments come last, in order
            own = len(successor.arguments)
            given, handed = given[: len(given) - own], given[len(given) - own :]
            if successor == argument.owner:
                yield handed[argument.arg_number]
