// A function without 64-bit integers stays as it is, and gets no wrapper.
// RUN: irongrad opt %s --pass narrow-integers --target vulkan:profile=generic
// UNCHANGED

// CHECK-NOT: @graph.f.narrow
// CHECK: func.func private @graph.f
// CHECK-NOT: @graph.f.narrow
func.func private @graph.f(%x: tensor<4xf32>, %y: tensor<4xi32>) -> (tensor<4xf32>, tensor<4xi32>) {
  %double = arith.addf %x, %x : tensor<4xf32>
  return %double, %y : tensor<4xf32>, tensor<4xi32>
}
