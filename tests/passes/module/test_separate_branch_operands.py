"""The pass separate-branch-operands is for modules whose control flow passes values on."""

from __future__ import annotations

import pytest

from irongrad.mlir.walk import parsed
from irongrad.pipeline.iree.compile import has_branches


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
def test_only_control_flow_that_passes_values_on_is_a_branch(operation: str, hands_on: bool) -> None:
    with parsed(f"util.func public @f(%flag: i1, %i: index) {{ {operation} util.return }}".encode()) as flow:
        assert has_branches(flow) is hands_on
