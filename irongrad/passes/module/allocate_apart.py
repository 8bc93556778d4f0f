"""Allocate values that outlive a submission separately, in functions with loops or branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.stream import ALLOCATION, PACK, PART, TRANSIENT, slices_of
from irongrad.mlir.walk import functions_of, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class AllocateApart(ModulePass):
    """Split an allocation that several submissions share into one for each value.

    Before:
        %memory, %ready = stream.resource.alloca {%total}
        %a = stream.resource.subview %memory[%0]; %b = stream.resource.subview %memory[%1]
    After:
        %a, %ready_a = stream.resource.alloca {%size_a}; %b, %ready_b = stream.resource.alloca {%size_b}

    IREE 3.13.0 allocates all values that a submission hands to later ones at once, and frees them together after the
    last read of any; if a loop begins with one of them, never. Functions without loops and branches stay as they are.
    """

    name: ClassVar[str] = "allocate-apart"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        split = 0
        for function in functions_of(module):
            operations = inside(function)
            if any(op.name.startswith("scf.") and len(op.results) for op in operations):
                shared = list(filter(_is_shared, operations))  # complete before any operation is erased
                for allocation in shared:
                    _allocate_each(allocation)
                split += len(shared)
        return PassResult(split > 0, {"split": split})


def _is_shared(operation: Any) -> bool:
    """Whether an operation allocates one buffer for transient values that are all live at the same time."""
    if operation.name != ALLOCATION or str(operation.results[0].type) != TRANSIENT:
        return False
    size = operation.operands[0].owner
    if getattr(size, "name", "") != PACK or any(s.start or s.end for s in slices_of(size)):
        return False
    return all(use.owner.name == PART for use in operation.results[0].uses)


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


PASS = AllocateApart
