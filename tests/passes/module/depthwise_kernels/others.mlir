// Left alone: half precision, two channels, sums that begin at another value, and convolutions of all channels.
// RUN: irongrad opt %s --pass depthwise-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

#image = affine_map<(n, w, c, j) -> (n, w + j, c)>
#weight = affine_map<(n, w, c, j) -> (j, c)>
#result = affine_map<(n, w, c, j) -> (n, w, c)>

// CHECK-NOT: flow.dispatch
util.func public @half(%x: tensor<2x10x32xf16>, %w: tensor<3x32xf16>) -> tensor<2x8x32xf16> {
  %zero = arith.constant 0.0 : f16
  %empty = tensor.empty() : tensor<2x8x32xf16>
  %zeros = linalg.fill ins(%zero : f16) outs(%empty : tensor<2x8x32xf16>) -> tensor<2x8x32xf16>
  %r = linalg.generic {indexing_maps = [#image, #weight, #result],
      iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<2x10x32xf16>, tensor<3x32xf16>) outs(%zeros : tensor<2x8x32xf16>) {
  ^bb0(%a: f16, %b: f16, %sum: f16):
    %0 = arith.mulf %a, %b : f16
    %1 = arith.addf %sum, %0 : f16
    linalg.yield %1 : f16
  } -> tensor<2x8x32xf16>
  util.return %r : tensor<2x8x32xf16>
}

util.func public @few_channels(%x: tensor<2x10x2xf32>, %w: tensor<3x2xf32>) -> tensor<2x8x2xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x8x2xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x8x2xf32>) -> tensor<2x8x2xf32>
  %r = linalg.generic {indexing_maps = [#image, #weight, #result],
      iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<2x10x2xf32>, tensor<3x2xf32>) outs(%zeros : tensor<2x8x2xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x8x2xf32>
  util.return %r : tensor<2x8x2xf32>
}

util.func public @begun(%x: tensor<2x10x32xf32>, %w: tensor<3x32xf32>, %begun: tensor<2x8x32xf32>) -> tensor<2x8x32xf32> {
  %r = linalg.generic {indexing_maps = [#image, #weight, #result],
      iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<2x10x32xf32>, tensor<3x32xf32>) outs(%begun : tensor<2x8x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x8x32xf32>
  util.return %r : tensor<2x8x32xf32>
}

util.func public @dense(%x: tensor<2x10x16xf32>, %w: tensor<3x16x32xf32>) -> tensor<2x8x32xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2x8x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x8x32xf32>) -> tensor<2x8x32xf32>
  %r = linalg.generic {
      indexing_maps = [affine_map<(n, w, o, c, j) -> (n, w + j, c)>, affine_map<(n, w, o, c, j) -> (j, c, o)>,
                       affine_map<(n, w, o, c, j) -> (n, w, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction"]}
      ins(%x, %w : tensor<2x10x16xf32>, tensor<3x16x32xf32>) outs(%zeros : tensor<2x8x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x8x32xf32>
  util.return %r : tensor<2x8x32xf32>
}
