"""Kernels that differ only in their offsets become one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import iree.runtime as ireert
import numpy as np
import pytest
from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of, inside, parsed
from irongrad.passes.base import PassResult
from irongrad.passes.module.share_kernels import ShareKernels
from irongrad.pipeline.iree.compile import compile_module
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of
from irongrad.targets import parse_target

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


@dataclass(frozen=True)
class Module:
    """The part of a portable module that compilation reads."""

    text: str
    entry_points: tuple[()] = ()

    @property
    def bytecode(self) -> bytes:
        """The module as bytecode."""
        with ir.Context():
            return bytecode_of(ir.Module.parse(self.text))


def _traffic(flow: bytes) -> dict[str, int]:
    with parsed(flow) as module:
        return traffic_of(module)


def test_the_kernels_of_one_size_are_one_and_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows: list[bytes] = []
    run = ShareKernels.run

    def recorded(self: ShareKernels, flow: ir.Module) -> PassResult:
        flows.append(bytecode_of(flow))
        result = run(self, flow)
        flows.append(bytecode_of(flow))
        return result

    monkeypatch.setattr(ShareKernels, "run", recorded)
    compiled = compile_module(Module(PARTS), parse_target("llvm-cpu"), tmp_path)
    before, after = flows
    assert _kernels(before) - _kernels(after) == 1
    assert _traffic(before) == _traffic(after)
    x = np.arange(4 * 9 * 8, dtype=np.float32).reshape(4, 9, 8)
    p, q, r = (np.zeros_like(x) for _ in range(3))
    p[:, :5, 2:5], q[:, 1:6, 2:5], r[:, 1:5, 2:5] = x[:, 1:6, 2:5], x[:, 3:8, 4:7], x[:, 3:7, 4:7]
    config = ireert.Config("local-sync")
    loaded = ireert.load_vm_module(ireert.VmModule.copy_buffer(config.vm_instance, compiled.vmfb), config)
    for found, expected in zip(loaded.f(x), (p, q, r), strict=True):
        np.testing.assert_array_equal(found.to_host(), expected)


def _kernels(flow: bytes) -> int:
    with parsed(flow) as module:
        assert module.operation.verify()
        return sum(op.name == "flow.executable" for op in inside(module.operation))
