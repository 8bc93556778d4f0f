// Left alone: results that are read as they are, another transpose, and sums that begin at another value.
// RUN: irongrad opt %s --pass channels-last

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK-NOT: linalg.generic
util.func public @read_twice(%x: tensor<2x8x10x12xf32>, %w: tensor<16x8x3x3xf32>) -> (tensor<2x8x10x16xf32>, tensor<2x16x8x10xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x16x8x10xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x16x8x10xf32>) -> tensor<2x16x8x10xf32>
  %y = linalg.conv_2d_nchw_fchw {strides = dense<1> : vector<2xi64>, dilations = dense<1> : vector<2xi64>}
      ins(%x, %w : tensor<2x8x10x12xf32>, tensor<16x8x3x3xf32>) outs(%zeros : tensor<2x16x8x10xf32>)
      -> tensor<2x16x8x10xf32>
  %last = tensor.empty() : tensor<2x8x10x16xf32>
  %t = linalg.transpose ins(%y : tensor<2x16x8x10xf32>) outs(%last : tensor<2x8x10x16xf32>) permutation = [0, 2, 3, 1]
  util.return %t, %y : tensor<2x8x10x16xf32>, tensor<2x16x8x10xf32>
}

// CHECK-NOT: linalg.generic
util.func public @another(%x: tensor<2x8x10x12xf32>, %w: tensor<16x8x3x3xf32>) -> tensor<16x2x8x10xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x16x8x10xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x16x8x10xf32>) -> tensor<2x16x8x10xf32>
  %y = linalg.conv_2d_nchw_fchw {strides = dense<1> : vector<2xi64>, dilations = dense<1> : vector<2xi64>}
      ins(%x, %w : tensor<2x8x10x12xf32>, tensor<16x8x3x3xf32>) outs(%zeros : tensor<2x16x8x10xf32>)
      -> tensor<2x16x8x10xf32>
  %last = tensor.empty() : tensor<16x2x8x10xf32>
  %t = linalg.transpose ins(%y : tensor<2x16x8x10xf32>) outs(%last : tensor<16x2x8x10xf32>) permutation = [1, 0, 2, 3]
  util.return %t : tensor<16x2x8x10xf32>
}

// CHECK-NOT: linalg.generic
util.func public @begun(%x: tensor<2x8x10x12xf32>, %w: tensor<16x8x3x3xf32>) -> tensor<2x8x10x16xf32> {
  %zero = arith.constant 1.0 : f32
  %empty = tensor.empty() : tensor<2x16x8x10xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x16x8x10xf32>) -> tensor<2x16x8x10xf32>
  %y = linalg.conv_2d_nchw_fchw {strides = dense<1> : vector<2xi64>, dilations = dense<1> : vector<2xi64>}
      ins(%x, %w : tensor<2x8x10x12xf32>, tensor<16x8x3x3xf32>) outs(%zeros : tensor<2x16x8x10xf32>)
      -> tensor<2x16x8x10xf32>
  %last = tensor.empty() : tensor<2x8x10x16xf32>
  %t = linalg.transpose ins(%y : tensor<2x16x8x10xf32>) outs(%last : tensor<2x8x10x16xf32>) permutation = [0, 2, 3, 1]
  util.return %t : tensor<2x8x10x16xf32>
}
