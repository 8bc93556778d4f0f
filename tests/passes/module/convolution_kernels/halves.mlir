// Operands are widened from bfloat16, one by an operation of its own and one in the sum: a kernel multiplies bfloat16,
// and rounds the sums.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f,+avx512bf16", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

#whole = affine_map<(n, c, h, w) -> (n, c, h, w)>

// CHECK: stream.executable private @[[KERNEL:windows_0_1x4096x64x288]]
// CHECK: dpbf16ps
// CHECK: util.func public @f([[X:%.+]]: tensor<4x34x34x32xbf16>, [[W:%.+]]: tensor<64x32x3x3xbf16>)
util.func public @f(%x: tensor<4x34x34x32xbf16>, %w: tensor<64x32x3x3xbf16>) -> tensor<4x64x32x32xbf16> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x64x32x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x64x32x32xf32>) -> tensor<4x64x32x32xf32>
  %room = tensor.empty() : tensor<64x32x3x3xf32>
  %wide = linalg.generic {indexing_maps = [#whole, #whole],
                          iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%w : tensor<64x32x3x3xbf16>) outs(%room : tensor<64x32x3x3xf32>) {
  ^bb0(%a: bf16, %out: f32):
    %0 = arith.extf %a : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<64x32x3x3xf32>
  // CHECK: [[SPLIT:%.+]] = tensor.expand_shape [[W]]
  // CHECK: [[BLOCKS:%.+]] = linalg.generic {{.*}} ins([[SPLIT]] : tensor<1x64x32x3x3xbf16>)
  // CHECK: flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[X]], [[BLOCKS]])
  // CHECK-SAME: -> tensor<4x32x32x64xbf16>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, o, h, w, c, i, j) -> (n, h + i, w + j, c)>,
                       affine_map<(n, o, h, w, c, i, j) -> (o, c, i, j)>,
                       affine_map<(n, o, h, w, c, i, j) -> (n, o, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %wide : tensor<4x34x34x32xbf16>, tensor<64x32x3x3xf32>) outs(%zeros : tensor<4x64x32x32xf32>) {
  ^bb0(%a: bf16, %b: f32, %sum: f32):
    %0 = arith.extf %a : bf16 to f32
    %1 = arith.mulf %0, %b : f32
    %2 = arith.addf %sum, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<4x64x32x32xf32>
  %narrow = tensor.empty() : tensor<4x64x32x32xbf16>
  %r = linalg.generic {indexing_maps = [#whole, #whole],
                       iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%y : tensor<4x64x32x32xf32>) outs(%narrow : tensor<4x64x32x32xbf16>) {
  ^bb0(%a: f32, %out: bf16):
    %0 = arith.truncf %a : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<4x64x32x32xbf16>
  util.return %r : tensor<4x64x32x32xbf16>
}
