// The weight of an input's gradient is flipped: the kernel reads the image backwards, and the weight as it is.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: util.func public @f([[G:%.+]]: tensor<4x34x34x64xf32>, [[W:%.+]]: tensor<64x32x3x3xf32>)
util.func public @f(%g: tensor<4x34x34x64xf32>, %w: tensor<64x32x3x3xf32>) -> tensor<4x32x32x32xf32> {
  %zero = arith.constant 0.0 : f32
  %last = arith.constant 2 : index
  %room = tensor.empty() : tensor<32x64x3x3xf32>
  %flipped = linalg.generic {indexing_maps = [affine_map<(c, o, i, j) -> (c, o, i, j)>],
                             iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      outs(%room : tensor<32x64x3x3xf32>) {
  ^bb0(%out: f32):
    %c = linalg.index 0 : index
    %o = linalg.index 1 : index
    %i = linalg.index 2 : index
    %j = linalg.index 3 : index
    %back_i = arith.subi %last, %i : index
    %back_j = arith.subi %last, %j : index
    %0 = tensor.extract %w[%o, %c, %back_i, %back_j] : tensor<64x32x3x3xf32>
    linalg.yield %0 : f32
  } -> tensor<32x64x3x3xf32>
  %empty = tensor.empty() : tensor<4x32x32x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x32x32x32xf32>) -> tensor<4x32x32x32xf32>
  // CHECK: [[SPLIT:%.+]] = tensor.expand_shape [[W]]
  // CHECK: [[BLOCKS:%.+]] = linalg.generic {{.*}} ins([[SPLIT]] : tensor<64x1x32x3x3xf32>)
  // CHECK: flow.dispatch @windows_0_1x4096x32x576::@windows_0_1x4096x32x576([[G]], [[BLOCKS]])
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, c, i, j, o) -> (n, h + i, w + j, o)>,
                       affine_map<(n, h, w, c, i, j, o) -> (c, o, i, j)>,
                       affine_map<(n, h, w, c, i, j, o) -> (n, h, w, c)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%g, %flipped : tensor<4x34x34x64xf32>, tensor<32x64x3x3xf32>) outs(%zeros : tensor<4x32x32x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %1 = arith.mulf %a, %b : f32
    %2 = arith.addf %sum, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<4x32x32x32xf32>
  util.return %y : tensor<4x32x32x32xf32>
}
