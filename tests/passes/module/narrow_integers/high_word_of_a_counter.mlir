// The high word of an element's index becomes zero, because no tensor has 2^32 elements.
// RUN: irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

#row = affine_map<(d0) -> (d0)>

// CHECK: func.func private @graph.f.narrow
// CHECK: linalg.index 0
// CHECK-NOT: arith.shrui
// CHECK: [[ZERO:%.+]] = arith.constant 0 : i32
// CHECK-NEXT: linalg.yield [[ZERO]] : i32
func.func private @graph.f() -> tensor<5xi64> {
  %word = arith.constant 32 : i64
  %empty = tensor.empty() : tensor<5xi64>
  %high = linalg.generic {indexing_maps = [#row], iterator_types = ["parallel"]} outs(%empty : tensor<5xi64>) {
  ^bb0(%out: i64):
    %i = linalg.index 0 : index
    %number = arith.index_cast %i : index to i64
    %above = arith.shrui %number, %word : i64
    linalg.yield %above : i64
  } -> tensor<5xi64>
  return %high : tensor<5xi64>
}
