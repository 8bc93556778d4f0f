"""Sizes that are known at run time alone: equal ones have one origin."""

from __future__ import annotations

from irongrad.mlir.any_size import origin_along, origin_of
from irongrad.mlir.walk import inside, parsed

# Each result of a loop keeps the sizes of its initial value; `%other` has sizes of its own.
SIZES = b"""
func.func @f(%x: tensor<?x?xf32>, %other: tensor<?x4xf32>, %a: index, %b: index, %i: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %f = arith.constant 0.0 : f32
  %tied = flow.tensor.tie_shape %x : tensor<?x?xf32>{%a, %b}
  %empty = tensor.empty(%b) : tensor<4x?xf32>
  %filled = linalg.fill ins(%f : f32) outs(%empty : tensor<4x?xf32>) -> tensor<4x?xf32>
  %of_filled = tensor.dim %filled, %one : tensor<4x?xf32>
  %loop = scf.for %t = %zero to %a step %one iter_args(%y = %tied) -> (tensor<?x?xf32>) {
    %of_carried = tensor.dim %y, %zero : tensor<?x?xf32>
    %next = tensor.insert_slice %other into %y[0, 0] [%i, 4] [1, 1] : tensor<?x4xf32> into tensor<?x?xf32>
    scf.yield %next : tensor<?x?xf32>
  }
  %of_loop = tensor.dim %loop, %one : tensor<?x?xf32>
  %of_other = tensor.dim %other, %zero : tensor<?x4xf32>
  %of_any = tensor.dim %loop, %i : tensor<?x?xf32>
  return
}
"""


def test_equal_sizes_have_one_origin() -> None:
    with parsed(SIZES) as module:
        *_, other, a, b, i = module.body.operations[0].regions[0].blocks[0].arguments
        sizes = [op.results[0] for op in inside(module.operation) if op.name == "tensor.dim"]
        of_filled, of_carried, of_loop, of_other, of_any = sizes
        assert origin_of(a) == origin_of(of_carried) == a
        assert origin_of(of_filled) == origin_of(of_loop) == b
        assert origin_of(of_other) == origin_along(other, 0) == (other, 0)
        assert origin_of(of_any) == of_any
        assert origin_of(i) == i
