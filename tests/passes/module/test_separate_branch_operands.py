"""References that a branch of IREE's virtual machine hands on."""

from __future__ import annotations

from io import BytesIO

import pytest
from iree.compiler import ir

from irongrad.mlir.walk import parsed
from irongrad.passes.module.separate_branch_operands import separate_branch_operands
from irongrad.pipeline.iree.compile import has_branches

LOOP = """
vm.module @m {
  vm.func @f(%a: !vm.ref<!hal.buffer>, %n: i32) -> !vm.ref<!hal.buffer> {
    vm.br ^loop(%a, %n, %a, %n : !vm.ref<!hal.buffer>, i32, !vm.ref<!hal.buffer>, i32)
  ^loop(%x: !vm.ref<!hal.buffer>, %i: i32, %y: !vm.ref<!hal.buffer>, %j: i32):
    vm.cond_br %i, ^loop(%x, %j, %x, %j : !vm.ref<!hal.buffer>, i32, !vm.ref<!hal.buffer>, i32), ^end
  ^end:
    vm.return %y : !vm.ref<!hal.buffer>
  }
}
"""


def test_no_branch_hands_on_one_reference_twice():
    with ir.Context():
        before = BytesIO()
        ir.Module.parse(LOOP).operation.write_bytecode(before)
    references: list[list[ir.Value]] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if operation.successors:
            references.append([o for o in operation.operands if "ref" in str(o.type)])
        return ir.WalkResult.ADVANCE

    with ir.Context():
        module = ir.Module.parse(separate_branch_operands(before.getvalue()))
        assert module.operation.verify()
        module.operation.walk(collect)
        assert [len(r) for r in references] == [len(set(r)) for r in references] == [2, 2]


@pytest.mark.parametrize(
    ("operation", "hands_on"),
    [
        ("scf.if %flag { util.optimization_barrier %i : index }", False),
        ("scf.if %flag { %r = scf.if %flag -> index { scf.yield %i : index } else { scf.yield %i : index } }", True),
        ("%r = scf.if %flag -> index { scf.yield %i : index } else { scf.yield %i : index }", True),
        ("%r = scf.for %j = %i to %i step %i iter_args(%k = %i) -> index { scf.yield %k : index }", True),
        (
            "%r = scf.while (%k = %flag) : (i1) -> i1 { scf.condition(%k) %k : i1 } "
            "do { ^bb0(%k: i1): scf.yield %k : i1 }",
            True,
        ),
        ("", False),
    ],
)
def test_only_what_hands_on_values_is_a_branch(operation: str, hands_on: bool) -> None:
    with parsed(f"util.func public @f(%flag: i1, %i: index) {{ {operation} util.return }}".encode()) as flow:
        assert has_branches(flow) is hands_on
