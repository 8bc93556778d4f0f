"""The bytes that the kernels of a compiled module read and write."""

from __future__ import annotations

from irongrad.mlir.walk import parsed
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of

FLOW = """
flow.executable private @e { flow.executable.export public @k }
util.func public @step(%x: tensor<8x4xf32>, %d: tensor<?xf32>, %n: index) -> tensor<8xf16> {
  %c0 = arith.constant 0 : index
  %c8 = arith.constant 8 : index
  %s = flow.tensor.slice %x[%c0, %c0 for %c8, %c0] : tensor<8x4xf32> -> tensor<8x2xf32>
  %r:2 = flow.dispatch @e::@k(%s, %d, %n) : (tensor<8x2xf32>, tensor<?xf32>{%n}, index) -> (tensor<8xf16>, tensor<4xi1>)
  %y = flow.tensor.reshape %r#0 : tensor<8xf16> -> tensor<2x4xf16>
  util.return %r#0 : tensor<8xf16>
}
util.func public @nothing() {
  util.return
}
"""


def test_operands_and_results_of_kernels_and_copies_count() -> None:
    copied, read, written = 2 * 8 * 2 * 4, 8 * 2 * 4, 8 * 2 + 4
    with parsed(FLOW.encode()) as module:
        assert traffic_of(module) == {"step": copied + read + written}
