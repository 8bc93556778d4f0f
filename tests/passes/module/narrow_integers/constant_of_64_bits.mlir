// The pass refuses a constant that does not fit into 32 bits.
// RUN: not irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

#row = affine_map<(d0) -> (d0)>

// CHECK: error: the step computes with 4294967296, which needs 64-bit integers
func.func private @graph.f(%x: tensor<5xi64>) -> tensor<5xi64> {
  %limit = arith.constant 4294967296 : i64
  %empty = tensor.empty() : tensor<5xi64>
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<5xi64>) outs(%empty : tensor<5xi64>) {
  ^bb0(%in: i64, %out: i64):
    %least = arith.minsi %in, %limit : i64
    linalg.yield %least : i64
  } -> tensor<5xi64>
  return %y : tensor<5xi64>
}
