"""Kernels that differ only in their offsets become one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import iree.runtime as ireert
import numpy as np
import pytest
from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of, inside, parsed
from irongrad.passes.module.share_kernels import share_kernels
from irongrad.pipeline.iree.compile import compile_module
from irongrad.pipeline.iree.report.kernel_bytes import traffic_of
from irongrad.targets import parse_target

# Two parts of one tensor, and one of another size, each written into the middle of zeros.
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
    """As much of a portable module as compiling takes."""

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

    def recorded(flow: ir.Module) -> None:
        flows.append(bytecode_of(flow))
        share_kernels(flow)
        flows.append(bytecode_of(flow))

    monkeypatch.setattr("irongrad.pipeline.iree.compile.share_kernels", recorded)
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


def test_what_is_shared_takes_its_places_as_arguments_and_is_shared_once() -> None:
    executables = "\n".join(_executable(name, reads, 5) for name, reads in (("a", 1), ("b", 3)))
    calls = "\n".join(f"  %{n} = flow.dispatch @{n}::@{n}(%x) : (tensor<9xf32>) -> tensor<5xf32>" for n in "ab")
    text = f"""{executables}
util.func public @f(%x: tensor<9xf32>) -> (tensor<5xf32>, tensor<5xf32>) {{
{calls}
  util.return %a, %b : tensor<5xf32>, tensor<5xf32>
}}"""
    shared = _shared(Module(text).bytecode)
    assert _kernels(shared) == 1
    assert [count for name, count in _operations(shared) if name == "flow.dispatch"] == [2, 2]
    assert _shared(shared) == shared


def test_kernels_that_compute_are_shared_where_they_compute_the_same() -> None:
    alike = _executable("a", 1, 5, "negf") + _executable("b", 3, 5, "negf")
    assert _kernels(_shared(Module(alike).bytecode)) == 1
    others = _executable("a", 1, 5, "negf") + _executable("b", 3, 5)
    assert _kernels(_shared(Module(others).bytecode)) == 2


def test_kernels_of_different_sizes_stay_apart() -> None:
    text = _executable("a", 1, 5) + _executable("b", 1, 4)
    bytecode = Module(text).bytecode
    assert _shared(bytecode) == bytecode


def _shared(bytecode: bytes) -> bytes:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        share_kernels(module)
        return bytecode_of(module)


def _executable(name: str, begin: int, size: int, function: str = "") -> str:
    given, made = (
        f"!iree_tensor_ext.dispatch.tensor<{t}>" for t in ("readonly:tensor<9xf32>", f"writeonly:tensor<{size}xf32>")
    )
    return f"""
flow.executable private @{name} {{
  flow.executable.export public @{name}
  builtin.module {{
    func.func @{name}(%from: {given}, %to: {made}) {{
      %0 = iree_tensor_ext.dispatch.tensor.load %from, offsets = [{begin}], sizes = [{size}], strides = [1]
        : {given} -> tensor<{size}xf32>
      {f"%1 = arith.{function} %0 : tensor<{size}xf32>" if function else ""}
      iree_tensor_ext.dispatch.tensor.store %{1 if function else 0}, %to, offsets = [0], sizes = [{size}], strides = [1]
        : tensor<{size}xf32> -> {made}
      return
    }}
  }}
}}"""


def _operations(bytecode: bytes) -> list[tuple[str, int]]:
    """The name of each operation, and how many operands it has."""
    with ir.Context():
        module = ir.Module.parse(bytecode)
        assert module.operation.verify()
        return [(op.name, len(op.operands)) for op in inside(module.operation)]


def _kernels(bytecode: bytes) -> int:
    return sum(name == "flow.executable" for name, _ in _operations(bytecode))
