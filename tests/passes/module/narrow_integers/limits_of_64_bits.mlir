// Reductions that begin with the limits of 64-bit integers begin with those of 32-bit integers instead.
// RUN: irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

// CHECK: func.func private @graph.f
// CHECK-DAG: arith.constant -2147483648 : i32
// CHECK-DAG: arith.constant dense<2147483647> : tensor<2xi32>
func.func private @graph.f() -> (tensor<i64>, tensor<2xi64>) {
  %smallest = arith.constant -9223372036854775808 : i64
  %largest = arith.constant dense<9223372036854775807> : tensor<2xi64>
  %one = tensor.from_elements %smallest : tensor<i64>
  return %one, %largest : tensor<i64>, tensor<2xi64>
}
