// Products of the same sizes and layouts share a kernel.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK-COUNT-1: stream.executable private
// CHECK-NOT: stream.executable private
// CHECK: util.func public @f([[A:%.+]]: tensor<128x128xf32>, [[B:%.+]]: tensor<128x128xf32>)
util.func public @f(%a: tensor<128x128xf32>, %b: tensor<128x128xf32>) -> tensor<128x128xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x128xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x128xf32>) -> tensor<128x128xf32>
  // CHECK: [[C:%.+]] = flow.dispatch @[[KERNEL:product_0_1x128x128x128]]::@[[KERNEL]]([[A]], [[B]])
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x128xf32>)
      outs(%zeros : tensor<128x128xf32>) -> tensor<128x128xf32>
  // CHECK-NEXT: flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[C]], [[B]])
  %d = linalg.matmul ins(%c, %b : tensor<128x128xf32>, tensor<128x128xf32>)
      outs(%zeros : tensor<128x128xf32>) -> tensor<128x128xf32>
  util.return %d : tensor<128x128xf32>
}
