"""Hoist lookups of rows in a table out of loops.

IREE 3.13.0 moves the slice of a row above the computation of all rows, so each iteration computes the row that it
reads. The lookup is then fused into the iteration's matrix product, where it runs element by element on packed
operands. An LSTM whose first layer looks its inputs up takes two to three times as long.
tests/passes/module/test_hoist_lookups.py tells when IREE no longer does this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import GENERIC, RESHAPES, is_elementwise
from irongrad.mlir.walk import around, block_of, inside, loops_around
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SLICE, _LOOKUP = "tensor.extract_slice", "tensor.extract"


@dataclass(frozen=True)
class HoistLookups(ModulePass):
    """Look rows up in a table before the loop that reads them.

    Before:
        %rows = linalg.generic { tensor.extract %table[...] }; scf.for %t { %row = tensor.extract_slice %rows[%t] ... }
    After:
        %rows = linalg.generic { ... }; %held = util.optimization_barrier %rows
        scf.for %t { %row = tensor.extract_slice %held[%t] ... }

    Rows that are not looked up in a table stay: they cost as much in the loop as before it, and no memory.
    """

    name: ClassVar[str] = "hoist-lookups"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        hoisted = 0
        for operation in [op for op in inside(module.operation) if op.name == _SLICE]:
            rows = operation.operands[0]
            loop = next(iter(loops_around(operation.block)), None)
            if (
                loop is not None
                and loop not in around(block_of(rows))
                and any(map(_is_lookup, _movable_producers(rows)))
            ):
                operation.operands[0] = hold(rows, ir.InsertionPoint(loop))
                hoisted += 1
        return PassResult(hoisted > 0, {"hoisted": hoisted})


def _movable_producers(value: Any) -> Iterator[Any]:
    """The operations behind `value` that IREE may move into a loop: reshapes and elementwise operations."""
    waiting, seen = [value], set()
    while waiting:
        owner = waiting.pop().owner
        if isinstance(owner, ir.Block) or owner.operation in seen:
            continue
        if owner.name not in RESHAPES and not is_elementwise(owner.operation):
            continue
        seen.add(owner.operation)
        yield owner.operation
        waiting += owner.operation.operands


def _is_lookup(operation: Any) -> bool:
    """Whether an operation reads a table at data-dependent indices."""
    if operation.name != GENERIC:
        return False
    lookups = [op for op in inside(operation) if op.name == _LOOKUP]
    return any(_depends_on_data(place) for op in lookups for place in list(op.operands)[1:])


def _depends_on_data(place: Any) -> bool:
    """Whether an index depends on elements of tensors, which are block arguments of an operation's body."""
    if isinstance(place.owner, ir.Block):
        return True
    return any(map(_depends_on_data, place.owner.operation.operands))


PASS = HoistLookups
