"""Branches of IREE's virtual machine, made safe for the register allocation of IREE 3.13.0.

A branch that hands one buffer or fence to two arguments of a block loses it: where the register of the first argument
is the one that holds the reference already, nothing is copied for it, and the second takes the reference out of it
(the MOVE bit in `RegisterAllocation::remapSuccessorRegisters`). Loops and branches that carry two tensors do so
wherever IREE packs both into one buffer, or computes both behind one fence. A lost buffer fails when the module runs
("indirect buffer reference slot 0 is out range"), a lost fence is not waited for. So every argument gets a reference
of its own here. With an allocation for each value (`layout.py`) no step is known that hands one buffer on twice; fences
still are.
"""

from __future__ import annotations

from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of


def separate_branch_operands(bytecode: bytes) -> bytes:
    """A module of the VM dialect with no reference twice among the operands of one branch.

    Args:
        bytecode: the module, as MLIR bytecode, which the result is too.
    """
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        module.operation.walk(_separate)
        return bytecode_of(module)


def _separate(operation: ir.Operation) -> ir.WalkResult:
    seen: set[ir.Value] = set()
    for index, value in enumerate(operation.operands if operation.successors else ()):
        if value in seen:
            with ir.InsertionPoint(operation):
                operation.operands[index] = _another(value)
        elif str(value.type).startswith("!vm.ref<"):
            seen.add(value)
    return ir.WalkResult.ADVANCE


def _another(reference: ir.Value) -> ir.Value:
    """A second value for a reference, by a selection that IREE does not fold."""
    flag = ir.IntegerType.get_signless(32)
    given = ir.Operation.create("vm.cmp.nz.ref", [flag], [reference]).result
    null = ir.Operation.create("vm.const.ref.zero", [reference.type]).result
    return ir.Operation.create("vm.select.ref", [reference.type], [given, reference, null]).result
