"""How much memory the functions of a compiled module take for intermediate values, from IREE's own allocations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iree.compiler import ir

from irongrad.pipeline.operations import constant_of, functions_of, inside, name_of

_TRANSIENT = "!stream.resource<transient>"


def transients_of(stream: ir.Module) -> dict[str, int]:
    """The most bytes that each public function holds at once, of a module that was compiled to the stream phase.

    Counted are allocations of the lifetime `transient`, of static size: what a function computes and drops, or hands
    from one of its submissions to the next, and what the functions that it calls hold besides. The state, arguments and
    results are none of them.
    """
    functions = {name_of(f): f for f in functions_of(stream)}
    return {n: most for n, f in functions.items() if _is_public(f) and (most := _most(f, functions))}


def _is_public(function: Any) -> bool:
    attributes = function.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value == "public"


def _most(function: Any, functions: Mapping[str, Any]) -> int:
    """The highest sum of sizes between allocations and deallocations, in program order."""
    now = most = 0
    for operation in inside(function):
        if operation.name == "stream.resource.alloca" and str(operation.results[0].type) == _TRANSIENT:
            now += constant_of(operation.operands[0]) or 0
            most = max(most, now)
        elif operation.name == "stream.resource.dealloca" and str(operation.operands[0].type) == _TRANSIENT:
            now -= constant_of(operation.operands[1]) or 0
        elif operation.name == "util.call":
            called = functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            most = max(most, now + _most(called, functions))
    return most
