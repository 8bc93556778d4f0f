"""Bugs of torch-mlir and IREE with unknown sizes, which the compiler works around."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

from torch_mlir.dialects.torch import register_dialect
from torch_mlir.ir import Context, Module

from irongrad.mlir.tools import run_tool
from irongrad.pipeline.iree.compile import COMMON_FLAGS
from irongrad.pipeline.lower.routes import _TO_LINALG, _torch_mlir_opt
from irongrad.targets import parse_target

VIEW = """
func.func @f(%x: !torch.vtensor<[?,?,16],f32>) -> !torch.vtensor<[?,16],f32>
    attributes {torch.assume_strict_symbolic_shapes} {
  %zero = torch.constant.int 0
  %one = torch.constant.int 1
  %sixteen = torch.constant.int 16
  %b = torch.aten.size.int %x, %zero : !torch.vtensor<[?,?,16],f32>, !torch.int -> !torch.int
  %t = torch.aten.size.int %x, %one : !torch.vtensor<[?,?,16],f32>, !torch.int -> !torch.int
  %n = torch.aten.mul.int %b, %t : !torch.int, !torch.int -> !torch.int
  %sizes = torch.prim.ListConstruct %n, %sixteen : (!torch.int, !torch.int) -> !torch.list<int>
  %y = torch.aten.view %x, %sizes : !torch.vtensor<[?,?,16],f32>, !torch.list<int> -> !torch.vtensor<[?,16],f32>
  return %y : !torch.vtensor<[?,16],f32>
}
"""


def _compiled(source: str, directory: Path) -> CompletedProcess[str]:
    path = directory / "source.mlir"
    path.write_text(source)
    flags = (*COMMON_FLAGS, *parse_target("llvm-cpu").flags)
    return run_tool("iree-compile", [*flags, str(path), "-o", str(directory / "module.vmfb")])


def lowered(module: str, scratch: Path) -> str:
    with Context() as context:
        register_dialect(context)
        _, linalg = _torch_mlir_opt(Module.parse(module), [f"--pass-pipeline={_TO_LINALG}"], scratch / "linalg.mlir")
    return linalg.decode()


def test_torch_mlir_still_takes_one_of_two_joined_sizes_for_one(tmp_path: Path):
    """When this fails, torch-mlir is fixed: `irongrad.pipeline.lower.reshapes` can go."""
    linalg = lowered(VIEW, tmp_path)
    assert "tensor<?x?x16xf32> to tensor<?x1x16xf32>" in linalg


def test_joined_dimensions_are_right(tmp_path: Path):
    joined = VIEW.replace(
        "torch.aten.view %x, %sizes : !torch.vtensor<[?,?,16],f32>, !torch.list<int>",
        "torch.prims.collapse %x, %zero, %one : !torch.vtensor<[?,?,16],f32>, !torch.int, !torch.int",
    )
    linalg = lowered(joined, tmp_path)
    assert "tensor.collapse_shape %arg0 [[0, 1], [2]] : tensor<?x?x16xf32> into tensor<?x16xf32>" in linalg


CALL_IN_A_LOOP = """
func.func private @sum(%x: tensor<?xf32>, %s: tensor<f32>) -> tensor<f32> attributes {noinline} {
  %r = linalg.reduce { arith.addf } ins(%x : tensor<?xf32>) outs(%s : tensor<f32>) dimensions = [0]
  return %r : tensor<f32>
}
func.func @f(%x: tensor<?xf32>) -> tensor<f32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c3 = arith.constant 3 : index
  %zero = arith.constant dense<0.0> : tensor<f32>
  %r = scf.for %i = %c0 to %c3 step %c1 iter_args(%s = %zero) -> (tensor<f32>) {
    %next = func.call @sum(%x, %s) : (tensor<?xf32>, tensor<f32>) -> tensor<f32>
    scf.yield %next : tensor<f32>
  }
  return %r : tensor<f32>
}
"""


def test_iree_still_forgets_calls_in_a_for_loop(tmp_path: Path):
    """When this fails, IREE is fixed: `irongrad.pipeline.assemble.stacked_steps._loop` can be a scf.for."""
    result = _compiled(CALL_IN_A_LOOP, tmp_path)
    assert result.returncode != 0
    assert "'util.call' op function type mismatch" in result.stderr


BARRIER_OF_TWO = """
func.func @f(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %double = arith.addf %x, %x : tensor<4xf32>
  %a, %b = util.optimization_barrier %double, %y : tensor<4xf32>, tensor<4xf32>
  %sum = arith.addf %a, %b : tensor<4xf32>
  return %sum : tensor<4xf32>
}
"""


def test_iree_still_gives_all_results_of_a_barrier_one_lifetime(tmp_path: Path):
    """When this fails, slices of stacked inputs can have one barrier (`irongrad.pipeline.assemble.bucket_dispatch`)."""
    result = _compiled(BARRIER_OF_TWO, tmp_path)
    assert result.returncode != 0
    assert "failed to verify that all of {operands, results} have same type" in result.stderr
