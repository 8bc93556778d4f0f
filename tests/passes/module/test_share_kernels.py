"""Kernels that differ only in their offsets become one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from irongrad.mlir.walk import inside, parsed
from irongrad.passes.module.share_kernels import ShareKernels
from irongrad.pipeline.iree.compile import compile_module
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of
from irongrad.targets import parse_target
from tests.fixtures.module_texts import Written, functions_of

# Two slices of one tensor, and one of another size, each written into the middle of zeros.
PARTS = """
func.func @f(%x: tensor<4x9x8xf32>) -> (tensor<4x9x8xf32>, tensor<4x9x8xf32>, tensor<4x9x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x9x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x9x8xf32>) -> tensor<4x9x8xf32>
  %a = tensor.extract_slice %x[0, 1, 2] [4, 5, 3] [1, 1, 1] : tensor<4x9x8xf32> to tensor<4x5x3xf32>
  %b = tensor.extract_slice %x[0, 3, 4] [4, 5, 3] [1, 1, 1] : tensor<4x9x8xf32> to tensor<4x5x3xf32>
  %c = tensor.extract_slice %x[0, 3, 4] [4, 4, 3] [1, 1, 1] : tensor<4x9x8xf32> to tensor<4x4x3xf32>
  %p = tensor.insert_slice %a into %zeros[0, 0, 2] [4, 5, 3] [1, 1, 1] : tensor<4x5x3xf32> into tensor<4x9x8xf32>
  %q = tensor.insert_slice %b into %zeros[0, 1, 2] [4, 5, 3] [1, 1, 1] : tensor<4x5x3xf32> into tensor<4x9x8xf32>
  %r = tensor.insert_slice %c into %zeros[0, 1, 2] [4, 4, 3] [1, 1, 1] : tensor<4x4x3xf32> into tensor<4x9x8xf32>
  return %p, %q, %r : tensor<4x9x8xf32>, tensor<4x9x8xf32>, tensor<4x9x8xf32>
}
"""


def _traffic(flow: bytes) -> dict[str, int]:
    with parsed(flow) as module:
        return traffic_of(module)


def test_the_kernels_of_one_size_are_one_and_compute_the_same(
    tmp_path: Path, around_pass: Callable[..., list[bytes]]
) -> None:
    flows = around_pass(ShareKernels)
    compiled = compile_module(Written(PARTS), parse_target("llvm-cpu"), tmp_path)
    before, after = flows
    assert _kernels(before) - _kernels(after) == 1
    assert _traffic(before) == _traffic(after)
    x = np.arange(4 * 9 * 8, dtype=np.float32).reshape(4, 9, 8)
    p, q, r = (np.zeros_like(x) for _ in range(3))
    p[:, :5, 2:5], q[:, 1:6, 2:5], r[:, 1:5, 2:5] = x[:, 1:6, 2:5], x[:, 3:8, 4:7], x[:, 3:7, 4:7]
    loaded = functions_of(compiled.vmfb)
    for found, expected in zip(loaded.f(x), (p, q, r), strict=True):
        np.testing.assert_array_equal(found.to_host(), expected)


def _kernels(flow: bytes) -> int:
    with parsed(flow) as module:
        assert module.operation.verify()
        return sum(op.name == "flow.executable" for op in inside(module.operation))
