// The gradient of a weight is a sum for each image, which are added up.
// RUN: irongrad opt %s --pass depthwise-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+fma", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: util.func public @f
util.func public @f(%x: tensor<4x10x10x8xf32>, %g: tensor<4x8x8x8xf32>) -> tensor<8x3x3xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<8x3x3xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<8x3x3xf32>) -> tensor<8x3x3xf32>
  // CHECK: [[PARTS:%.+]] = flow.dispatch
  // CHECK-SAME: -> tensor<4x3x3x8xf32>
  // CHECK: linalg.generic
  // CHECK-SAME: "reduction"
  // CHECK-SAME: ins([[PARTS]] : tensor<4x3x3x8xf32>)
  %r = linalg.generic {
      indexing_maps = [affine_map<(c, i, j, n, h, w) -> (n, i + h, j + w, c)>,
                       affine_map<(c, i, j, n, h, w) -> (n, h, w, c)>, affine_map<(c, i, j, n, h, w) -> (c, i, j)>],
      iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %g : tensor<4x10x10x8xf32>, tensor<4x8x8x8xf32>) outs(%zeros : tensor<8x3x3xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %0, %sum : f32
    linalg.yield %1 : f32
  } -> tensor<8x3x3xf32>
  util.return %r : tensor<8x3x3xf32>
}
