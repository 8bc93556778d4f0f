// A kernel reads the windows of a channels-last image in place, and writes a result that is channels-last, too.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @[[KERNEL:windows_0_1x4096x64x288]]
// CHECK: vector.fma
// CHECK: util.func public @f([[X:%.+]]: tensor<4x34x34x32xf32>, [[W:%.+]]: tensor<64x32x3x3xf32>)
util.func public @f(%x: tensor<4x34x34x32xf32>, %w: tensor<64x32x3x3xf32>) -> tensor<4x64x32x32xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x64x32x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x64x32x32xf32>) -> tensor<4x64x32x32xf32>
  // CHECK: [[SPLIT:%.+]] = tensor.expand_shape [[W]]
  // CHECK: [[BLOCKS:%.+]] = linalg.generic {{.*}} ins([[SPLIT]] : tensor<1x64x32x3x3xf32>)
  // CHECK: [[Y:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[X]], [[BLOCKS]])
  // CHECK-SAME: -> tensor<4x32x32x64xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, o, h, w, c, i, j) -> (n, h + i, w + j, c)>,
                       affine_map<(n, o, h, w, c, i, j) -> (o, c, i, j)>,
                       affine_map<(n, o, h, w, c, i, j) -> (n, o, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%x, %w : tensor<4x34x34x32xf32>, tensor<64x32x3x3xf32>) outs(%zeros : tensor<4x64x32x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x64x32x32xf32>
  // CHECK: linalg.generic
  // CHECK-SAME: ins([[Y]] : tensor<4x32x32x64xf32>)
  %r = linalg.generic {
      indexing_maps = [affine_map<(n, c, h, w) -> (n, c, h, w)>, affine_map<(n, c, h, w) -> (n, c, h, w)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%y : tensor<4x64x32x32xf32>) outs(%empty : tensor<4x64x32x32xf32>) {
  ^bb0(%a: f32, %out: f32):
    %0 = math.absf %a : f32
    linalg.yield %0 : f32
  } -> tensor<4x64x32x32xf32>
  util.return %r : tensor<4x64x32x32xf32>
}
