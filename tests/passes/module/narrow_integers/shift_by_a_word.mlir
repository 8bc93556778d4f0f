// The pass refuses a shift by 32 bits, which reads the high word. JAX's random numbers use such shifts.
// RUN: not irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

#row = affine_map<(d0) -> (d0)>

// CHECK: error: the step shifts a number by 32, which needs 64-bit integers
func.func private @graph.f(%x: tensor<5xi64>) -> tensor<5xi64> {
  %by = arith.constant 32 : i64
  %empty = tensor.empty() : tensor<5xi64>
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<5xi64>) outs(%empty : tensor<5xi64>) {
  ^bb0(%in: i64, %out: i64):
    %high = arith.shrui %in, %by : i64
    linalg.yield %high : i64
  } -> tensor<5xi64>
  return %y : tensor<5xi64>
}
