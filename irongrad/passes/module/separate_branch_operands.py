"""Make branches of IREE's virtual machine safe for the register allocation of IREE 3.13.0.

A branch that passes one buffer or fence to two arguments of a block loses it. If the first argument's register already
holds the reference, nothing is copied for that argument. The second argument then moves the reference out of that
register (the MOVE bit in `RegisterAllocation::remapSuccessorRegisters`). A loop or branch that carries two tensors does
this if IREE packs both into one buffer, or computes both behind one fence. A lost buffer fails when the module runs
("indirect buffer reference slot 0 is out range"). A lost fence is not waited for. So this pass gives every argument a
reference of its own. With one allocation per value (`allocate_apart.py`), no known step passes a buffer twice; some
pass a fence twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class SeparateBranchOperands(ModulePass):
    """Give every argument of a branch a reference of its own.

    Before:
        vm.br ^bb1(%buffer, %buffer : !vm.ref<!hal.buffer>, !vm.ref<!hal.buffer>)
    After:
        %another = vm.select.ref %given, %buffer, %null; vm.br ^bb1(%buffer, %another : ...)
    """

    name: ClassVar[str] = "separate-branch-operands"
    required: ClassVar[str] = "IREE's register allocation loses a reference that a branch hands on twice"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        separated = 0

        def separate(operation: ir.Operation) -> ir.WalkResult:
            nonlocal separated
            separated += _separate(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(separate)
        return PassResult(separated > 0, {"separated": separated})


def _separate(operation: ir.Operation) -> int:
    seen: set[ir.Value] = set()
    separated = 0
    for index, value in enumerate(operation.operands if operation.successors else ()):
        if value in seen:
            with ir.InsertionPoint(operation):
                operation.operands[index] = _duplicate(value)
            separated += 1
        elif str(value.type).startswith("!vm.ref<"):
            seen.add(value)
    return separated


def _duplicate(reference: ir.Value) -> ir.Value:
    """A second value with the same reference, from a select that IREE does not fold."""
    flag = ir.IntegerType.get_signless(32)
    is_set = ir.Operation.create("vm.cmp.nz.ref", [flag], [reference]).result
    null = ir.Operation.create("vm.const.ref.zero", [reference.type]).result
    return ir.Operation.create("vm.select.ref", [reference.type], [is_set, reference, null]).result


PASS = SeparateBranchOperands
