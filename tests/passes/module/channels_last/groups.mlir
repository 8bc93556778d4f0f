// The groups of a convolution are joined behind it, with the channels last.
// RUN: irongrad opt %s --pass channels-last

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: util.func public @f
util.func public @f(%x: tensor<2x4x8x10x12xf32>, %w: tensor<4x6x8x3x3xf32>) -> tensor<2x8x10x24xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x4x6x8x10xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x4x6x8x10xf32>) -> tensor<2x4x6x8x10xf32>
  %y = linalg.conv_2d_ngchw_gfchw {strides = dense<1> : vector<2xi64>, dilations = dense<1> : vector<2xi64>}
      ins(%x, %w : tensor<2x4x8x10x12xf32>, tensor<4x6x8x3x3xf32>) outs(%zeros : tensor<2x4x6x8x10xf32>)
      -> tensor<2x4x6x8x10xf32>
  %joined = tensor.collapse_shape %y [[0], [1, 2], [3], [4]] : tensor<2x4x6x8x10xf32> into tensor<2x24x8x10xf32>
  %last = tensor.empty() : tensor<2x8x10x24xf32>
  // CHECK: [[R:%.+]] = linalg.generic
  // CHECK-SAME: outs({{.*}} : tensor<2x8x10x4x6xf32>)
  // CHECK: [[J:%.+]] = tensor.collapse_shape [[R]] {{.*}} : tensor<2x8x10x4x6xf32> into tensor<2x8x10x24xf32>
  // CHECK: util.return [[J]]
  %t = linalg.transpose ins(%joined : tensor<2x24x8x10xf32>) outs(%last : tensor<2x8x10x24xf32>)
      permutation = [0, 2, 3, 1]
  util.return %t : tensor<2x8x10x24xf32>
}
