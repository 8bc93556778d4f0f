// With AMX, the kernel of a weight gradient of bfloat16 reads the image as it is: it needs no copy of pairs of positions.
// RUN: irongrad opt %s --pass convolution-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f,+avx512bf16,+amx-tile,+amx-bf16", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @[[KERNEL:windows_0_2x144x64x1024]]
// CHECK: tdpbf16ps
// CHECK-NOT: linalg.generic
// CHECK: util.func public @f([[X:%.+]]: tensor<4x34x34x2x16xbf16>, [[G:%.+]]: tensor<4x16x16x2x64xbf16>)
util.func public @f(%x: tensor<4x34x34x2x16xbf16>, %g: tensor<4x16x16x2x64xbf16>) -> tensor<3x3x16x2x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<3x3x16x2x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<3x3x16x2x64xf32>) -> tensor<3x3x16x2x64xf32>
  // CHECK: [[Y:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[X]], [[G]])
  // CHECK-SAME: -> tensor<3x3x16x2x64xf32>
  // CHECK: util.return [[Y]]
  %y = linalg.generic {
      indexing_maps = [affine_map<(i, j, c, b, o, n, h, w) -> (n, h * 2 + i, w * 2 + j, b, c)>,
                       affine_map<(i, j, c, b, o, n, h, w) -> (n, h, w, b, o)>,
                       affine_map<(i, j, c, b, o, n, h, w) -> (i, j, c, b, o)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel",
                        "reduction", "reduction", "reduction"]}
      ins(%x, %g : tensor<4x34x34x2x16xbf16>, tensor<4x16x16x2x64xbf16>) outs(%zeros : tensor<3x3x16x2x64xf32>) {
  ^bb0(%a: bf16, %b: bf16, %sum: f32):
    %0 = arith.extf %a : bf16 to f32
    %1 = arith.extf %b : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<3x3x16x2x64xf32>
  util.return %y : tensor<3x3x16x2x64xf32>
}
