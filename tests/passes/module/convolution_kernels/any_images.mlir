// The number of images may be known at run time alone: a launch gives the number of their windows.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#image = affine_map<(n, o, h, w, c, i, j) -> (n, h + i, w + j, c)>
#weight = affine_map<(n, o, h, w, c, i, j) -> (o, c, i, j)>
#result = affine_map<(n, o, h, w, c, i, j) -> (n, h, w, o)>

// CHECK: stream.executable private @[[KERNEL:windows_0_1xDx64x288]]
// CHECK: util.func public @f([[X:%.+]]: tensor<?x34x34x32xf32>, {{.*}}, [[N:%.+]]: index)
util.func public @f(%x: tensor<?x34x34x32xf32>, %w: tensor<64x32x3x3xf32>, %n: index) -> tensor<?x32x32x64xf32> {
  %zero = arith.constant 0.0 : f32
  %images = flow.tensor.tie_shape %x : tensor<?x34x34x32xf32>{%n}
  %empty = tensor.empty(%n) : tensor<?x32x32x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x32x32x64xf32>) -> tensor<?x32x32x64xf32>
  // CHECK: [[EACH:%.+]] = arith.constant 1024 : index
  // CHECK: [[ROWS:%.+]] = arith.muli [[N]], [[EACH]] : index
  // CHECK: flow.dispatch @[[KERNEL]]::@[[KERNEL]][[[ROWS]]]({{.+}}, {{.+}}, [[ROWS]])
  // CHECK-SAME: -> tensor<?x32x32x64xf32>{[[N]]}
  %y = linalg.generic {indexing_maps = [#image, #weight, #result],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%images, %w : tensor<?x34x34x32xf32>, tensor<64x32x3x3xf32>) outs(%zeros : tensor<?x32x32x64xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?x32x32x64xf32>
  util.return %y : tensor<?x32x32x64xf32>
}
