// A CPU that only multiplies float32 computes a product of bfloat16 by the kernel of float32.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @[[KERNEL:product_0_1x128x96x128]]
// CHECK-NOT: dpbf16ps
// CHECK: util.func public @f([[A:%.+]]: tensor<128x128xbf16>, [[B:%.+]]: tensor<128x96xbf16>)
util.func public @f(%a: tensor<128x128xbf16>, %b: tensor<128x96xbf16>) -> tensor<128x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  // CHECK: [[LEFT:%.+]] = linalg.generic
  // CHECK: arith.extf
  // CHECK: [[C:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[LEFT]], [[B]])
  // CHECK-SAME: (tensor<128x128xf32>, tensor<128x96xbf16>) -> tensor<128x96xf32>
  // CHECK-NEXT: util.return [[C]]
  %c = linalg.matmul ins(%a, %b : tensor<128x128xbf16>, tensor<128x96xbf16>)
      outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
