// An operand of bfloat16 that is widened before it is transposed is read as it lies in memory.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f,+avx512bf16", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

#both = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>

// CHECK: stream.executable private @[[KERNEL:product_0_1x128x96x128]]
// CHECK: llvm.x86.avx512bf16.dpbf16ps.512
// CHECK: util.func public @f([[A:%.+]]: tensor<128x128xbf16>, [[B:%.+]]: tensor<96x128xbf16>)
util.func public @f(%a: tensor<128x128xbf16>, %b: tensor<96x128xbf16>) -> tensor<128x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  %wide = tensor.empty() : tensor<96x128xf32>
  %widened = linalg.generic {indexing_maps = [#both, #both], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<96x128xbf16>) outs(%wide : tensor<96x128xf32>) {
  ^bb0(%x: bf16, %y: f32):
    %r = arith.extf %x : bf16 to f32
    linalg.yield %r : f32
  } -> tensor<96x128xf32>
  %room = tensor.empty() : tensor<128x96xf32>
  %turned = linalg.generic {indexing_maps = [#turned, #both], iterator_types = ["parallel", "parallel"]}
      ins(%widened : tensor<96x128xf32>) outs(%room : tensor<128x96xf32>) {
  ^bb0(%x: f32, %y: f32):
    linalg.yield %x : f32
  } -> tensor<128x96xf32>
  // CHECK: [[C:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[A]], [[B]])
  // CHECK-SAME: (tensor<128x128xbf16>, tensor<96x128xbf16>) -> tensor<128x96xf32>
  // CHECK-NEXT: util.return [[C]]
  %c = linalg.matmul ins(%a, %turned : tensor<128x128xbf16>, tensor<128x96xf32>)
      outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
