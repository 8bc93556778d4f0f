// A kernel transposes a right operand block by block, in its own memory. A transposed left one is read directly.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#left = affine_map<(m, n, k) -> (k, m)>
#right = affine_map<(m, n, k) -> (n, k)>
#result = affine_map<(m, n, k) -> (m, n)>

// CHECK: memref.alloca() alignment = 64 : memref<6144xf32>
// CHECK: util.func public @f([[A:%.+]]: tensor<128x128xf32>, [[B:%.+]]: tensor<96x128xf32>)
util.func public @f(%a: tensor<128x128xf32>, %b: tensor<96x128xf32>) -> tensor<128x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  // CHECK-NOT: linalg.generic
  // CHECK: flow.dispatch @[[KERNEL:product_0_1x128x96x128]]::@[[KERNEL]]([[A]], [[B]])
  %c = linalg.matmul indexing_maps = [#left, #right, #result]
      ins(%a, %b : tensor<128x128xf32>, tensor<96x128xf32>) outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
