"""The operations and calls of a function of a module, each with the branches that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iree.compiler import ir

_CALL, _IF = "util.call", "scf.if"

# The branches around an operation, from the outermost inwards. Each is named by its place: the indices of the
# operations and regions on the way to it.
Branches = tuple[tuple[int, ...], ...]


def with_branches(
    operation: Any, branches: Branches = (), place: tuple[int, ...] = ()
) -> Iterator[tuple[Any, Branches]]:
    """The operations inside `operation`, in program order, each with the branches that it is in."""
    for number, region in enumerate(operation.regions):
        own = (*branches, (*place, number)) if operation.name == _IF else branches
        for index, inner in enumerate(inner.operation for block in region for inner in block):
            yield inner, own
            yield from with_branches(inner, own, (*place, number, index))


def calls_in(function: Any) -> Iterator[tuple[Any, Branches]]:
    """The calls of a function, each with the branches that it is in."""
    return ((operation, branches) for operation, branches in with_branches(function) if operation.name == _CALL)


def callee_of(call: Any) -> str:
    """The name of the function that is called."""
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)
