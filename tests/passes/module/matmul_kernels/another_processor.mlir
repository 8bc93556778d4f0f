// IREE compiles the products if the CPU has no AVX2.
// RUN: irongrad opt %s --pass matmul-kernels
// UNCHANGED

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-arm_64",
    {cpu_features = "+neon", target_triple = "aarch64-unknown-unknown-eabi-elf"}>]> : !hal.device

util.func public @f(%a: tensor<128x128xf32>, %b: tensor<128x96xf32>) -> tensor<128x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x96xf32>)
      outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
