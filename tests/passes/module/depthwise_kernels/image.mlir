// A kernel of ours filters a channels-last image without its padding. The reader takes the result channels-last, too.
// RUN: irongrad opt %s --pass depthwise-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @[[KERNEL:filter_0_2x8x8x32_3x3]]
// CHECK: vector.fma
// CHECK: util.func public @f([[X:%.+]]: tensor<2x8x8x32xf32>, [[W:%.+]]: tensor<3x3x32xf32>)
util.func public @f(%x: tensor<2x8x8x32xf32>, %w: tensor<3x3x32xf32>) -> tensor<2x32x8x8xf32> {
  %zero = arith.constant 0.0 : f32
  %padded = tensor.pad %x low[0, 1, 1, 0] high[0, 1, 1, 0] {
  ^bb0(%i: index, %j: index, %k: index, %l: index):
    tensor.yield %zero : f32
  } : tensor<2x8x8x32xf32> to tensor<2x10x10x32xf32>
  %empty = tensor.empty() : tensor<2x32x8x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x32x8x8xf32>) -> tensor<2x32x8x8xf32>
  // CHECK: [[Y:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[X]], [[W]])
  // CHECK-SAME: -> tensor<2x8x8x32xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, c, i, j) -> (n, h + i, w + j, c)>,
                       affine_map<(n, h, w, c, i, j) -> (i, j, c)>, affine_map<(n, h, w, c, i, j) -> (n, c, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction"]}
      ins(%padded, %w : tensor<2x10x10x32xf32>, tensor<3x3x32xf32>) outs(%zeros : tensor<2x32x8x8xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x32x8x8xf32>
  // CHECK: linalg.generic
  // CHECK-SAME: ins([[Y]] : tensor<2x8x8x32xf32>)
  %r = linalg.generic {
      indexing_maps = [affine_map<(n, c, h, w) -> (n, c, h, w)>, affine_map<(n, c, h, w) -> (n, c, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%y : tensor<2x32x8x8xf32>) outs(%empty : tensor<2x32x8x8xf32>) {
  ^bb0(%a: f32, %out: f32):
    %0 = math.absf %a : f32
    linalg.yield %0 : f32
  } -> tensor<2x32x8x8xf32>
  util.return %r : tensor<2x32x8x8xf32>
}
