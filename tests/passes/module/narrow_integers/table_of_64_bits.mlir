// The pass refuses a table with a number that does not fit into 32 bits. The message names the number.
// RUN: not irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

// CHECK: error: the step computes with -2147483649, which needs 64-bit integers
func.func private @graph.f() -> tensor<3xi64> {
  %table = arith.constant dense<[1, -2147483649, 2147483647]> : tensor<3xi64>
  return %table : tensor<3xi64>
}
