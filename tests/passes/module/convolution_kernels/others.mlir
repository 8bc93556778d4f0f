// Left alone: half precision, sums that begin at another value, small ones, one output, and kernels of one tap.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK-NOT: flow.dispatch
util.func public @half(%x: tensor<4x34x34x32xf16>, %w: tensor<3x3x32x64xf16>) -> tensor<4x32x32x64xf16> {
  %zero = arith.constant 0.0 : f16
  %empty = tensor.empty() : tensor<4x32x32x64xf16>
  %zeros = linalg.fill ins(%zero : f16) outs(%empty : tensor<4x32x32x64xf16>) -> tensor<4x32x32x64xf16>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, o, c, i, j) -> (n, h + i, w + j, c)>, affine_map<(n, h, w, o, c, i, j) -> (i, j, c, o)>, affine_map<(n, h, w, o, c, i, j) -> (n, h, w, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %w : tensor<4x34x34x32xf16>, tensor<3x3x32x64xf16>) outs(%zeros : tensor<4x32x32x64xf16>) {
  ^bb0(%a: f16, %b: f16, %sum: f16):
    %0 = arith.mulf %a, %b : f16
    %1 = arith.addf %sum, %0 : f16
    linalg.yield %1 : f16
  } -> tensor<4x32x32x64xf16>
  util.return %y : tensor<4x32x32x64xf16>
}

// CHECK-NOT: flow.dispatch
util.func public @begun(%x: tensor<4x34x34x32xf32>, %w: tensor<3x3x32x64xf32>) -> tensor<4x32x32x64xf32> {
  %zero = arith.constant 1.0 : f32
  %empty = tensor.empty() : tensor<4x32x32x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x32x32x64xf32>) -> tensor<4x32x32x64xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, o, c, i, j) -> (n, h + i, w + j, c)>, affine_map<(n, h, w, o, c, i, j) -> (i, j, c, o)>, affine_map<(n, h, w, o, c, i, j) -> (n, h, w, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %w : tensor<4x34x34x32xf32>, tensor<3x3x32x64xf32>) outs(%zeros : tensor<4x32x32x64xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x32x32x64xf32>
  util.return %y : tensor<4x32x32x64xf32>
}

// CHECK-NOT: flow.dispatch
util.func public @small(%x: tensor<1x10x10x4xf32>, %w: tensor<3x3x4x8xf32>) -> tensor<1x8x8x8xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1x8x8x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<1x8x8x8xf32>) -> tensor<1x8x8x8xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, o, c, i, j) -> (n, h + i, w + j, c)>, affine_map<(n, h, w, o, c, i, j) -> (i, j, c, o)>, affine_map<(n, h, w, o, c, i, j) -> (n, h, w, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %w : tensor<1x10x10x4xf32>, tensor<3x3x4x8xf32>) outs(%zeros : tensor<1x8x8x8xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<1x8x8x8xf32>
  util.return %y : tensor<1x8x8x8xf32>
}

// CHECK-NOT: flow.dispatch
util.func public @one_output(%x: tensor<4x34x34x32xf32>, %w: tensor<3x3x32xf32>) -> tensor<4x32x32xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x32x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x32x32xf32>) -> tensor<4x32x32xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, c, i, j) -> (n, h + i, w + j, c)>, affine_map<(n, h, w, c, i, j) -> (i, j, c)>, affine_map<(n, h, w, c, i, j) -> (n, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %w : tensor<4x34x34x32xf32>, tensor<3x3x32xf32>) outs(%zeros : tensor<4x32x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x32x32xf32>
  util.return %y : tensor<4x32x32xf32>
}

// CHECK-NOT: flow.dispatch
util.func public @one_tap(%x: tensor<4x32x32x64xf32>, %w: tensor<64x64xf32>) -> tensor<4x32x32x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x32x32x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x32x32x64xf32>) -> tensor<4x32x32x64xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, o, c) -> (n, h, w, c)>, affine_map<(n, h, w, o, c) -> (c, o)>, affine_map<(n, h, w, o, c) -> (n, h, w, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<4x32x32x64xf32>, tensor<64x64xf32>) outs(%zeros : tensor<4x32x32x64xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x32x32x64xf32>
  util.return %y : tensor<4x32x32x64xf32>
}
