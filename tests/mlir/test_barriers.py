"""Barriers: what they hold in place, and how they are put in and taken out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from iree.compiler import ir

from irongrad.mlir import barriers
from irongrad.mlir.barriers import BARRIER, hold_behind, release
from irongrad.mlir.walk import inside
from irongrad.pipeline.iree.tools import compile_file
from irongrad.runtime.errors import ToolchainError

PRODUCT = """
util.func public @product(%a: tensor<?x3xf32>, %b: tensor<3x8xf32>, %c: tensor<8x3xf32>, %n: index)
    -> tensor<?x3xf32> {
  %zero = arith.constant 0.0 : f32
  %x = flow.tensor.tie_shape %a : tensor<?x3xf32>{%n}
  %empty = tensor.empty(%n) : tensor<?x8xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x8xf32>) -> tensor<?x8xf32>
  %p = linalg.matmul ins(%x, %b : tensor<?x3xf32>, tensor<3x8xf32>) outs(%fill : tensor<?x8xf32>) -> tensor<?x8xf32>
  %first = arith.constant 0 : index
  %rows = tensor.dim %p, %first : tensor<?x8xf32>
  %wide = tensor.empty(%rows) : tensor<?x3xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%wide : tensor<?x3xf32>) -> tensor<?x3xf32>
  %q = linalg.matmul ins(%p, %c : tensor<?x8xf32>, tensor<8x3xf32>) outs(%zeros : tensor<?x3xf32>) -> tensor<?x3xf32>
  util.return %q : tensor<?x3xf32>
}
"""


def product(module: ir.Module) -> ir.Value:
    return next(op for op in inside(module.operation) if op.name == "linalg.matmul").results[0]


def names(module: ir.Module) -> Counter[str]:
    return Counter(op.name for op in inside(module.operation))


def compile_held(folder: Path) -> None:
    """Compile a module with a barrier behind its first product to the phase `flow`."""
    with ir.Context():
        module = ir.Module.parse(PRODUCT)
        hold_behind(product(module))
        (folder / "step.mlir").write_text(str(module))
    flags = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")
    compile_file(
        [*flags, "--compile-from=global-optimization", "--compile-to=flow"], folder / "step.mlir", folder / "flow"
    )


def test_a_barrier_goes_in_and_comes_out_again() -> None:
    with ir.Context():
        module = ir.Module.parse(PRODUCT)
        before = names(module)
        held = hold_behind(product(module))
        assert module.operation.verify()
        assert BARRIER in names(module)
        release(held)
        assert module.operation.verify()
        assert names(module) == before


def test_a_tensor_of_unknown_size_is_held(tmp_path: Path) -> None:
    compile_held(tmp_path)


def test_iree_still_loses_sizes_behind_a_barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "_sizes", lambda value: [])
    with pytest.raises(ToolchainError, match="'tensor.dim' op unexpected"):
        compile_held(tmp_path)
