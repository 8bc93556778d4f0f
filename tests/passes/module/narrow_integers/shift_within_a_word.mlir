// A shift by less than 32 bits becomes a shift of 32-bit integers.
// RUN: irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

#row = affine_map<(d0) -> (d0)>

// CHECK: func.func private @graph.f.narrow
// CHECK: arith.constant 31 : i32
// CHECK: arith.shrui {{.+}} : i32
func.func private @graph.f(%x: tensor<5xi64>) -> tensor<5xi64> {
  %by = arith.constant 31 : i64
  %empty = tensor.empty() : tensor<5xi64>
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<5xi64>) outs(%empty : tensor<5xi64>) {
  ^bb0(%in: i64, %out: i64):
    %high = arith.shrui %in, %by : i64
    linalg.yield %high : i64
  } -> tensor<5xi64>
  return %y : tensor<5xi64>
}
