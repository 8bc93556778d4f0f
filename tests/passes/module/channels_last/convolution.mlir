// A convolution writes its result channels-last if a transpose does so and nothing else reads it.
// RUN: irongrad opt %s --pass channels-last

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: [[X:#.+]] = affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d4, d1 * 2 + d5, d2 + d6 * 3)>
// CHECK: [[W:#.+]] = affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d3, d4, d5, d6)>
// CHECK: [[Y:#.+]] = affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d2, d3)>
// CHECK: util.func public @f
util.func public @f(%x: tensor<2x8x19x22xf32>, %w: tensor<16x8x3x5xf32>) -> tensor<2x9x10x16xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x16x9x10xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x16x9x10xf32>) -> tensor<2x16x9x10xf32>
  %y = linalg.conv_2d_nchw_fchw {strides = dense<[2, 1]> : vector<2xi64>, dilations = dense<[1, 3]> : vector<2xi64>}
      ins(%x, %w : tensor<2x8x19x22xf32>, tensor<16x8x3x5xf32>) outs(%zeros : tensor<2x16x9x10xf32>)
      -> tensor<2x16x9x10xf32>
  %last = tensor.empty() : tensor<2x9x10x16xf32>
  // CHECK: [[R:%.+]] = linalg.generic {indexing_maps = {{.*}}[[X]], [[W]], [[Y]]
  // CHECK: util.return [[R]] : tensor<2x9x10x16xf32>
  %t = linalg.transpose ins(%y : tensor<2x16x9x10xf32>) outs(%last : tensor<2x9x10x16xf32>) permutation = [0, 2, 3, 1]
  util.return %t : tensor<2x9x10x16xf32>
}
