// Products of float32 use no microkernels, because the code that IREE generates is as fast.
// RUN: irongrad opt %s --pass use-microkernels
// UNCHANGED

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx512f,+avx512bf16",
     target_triple = "x86_64-unknown-unknown-eabi-elf", ukernels = "none"}>]> : !hal.device
#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>

// CHECK: target_triple = "x86_64-unknown-unknown-eabi-elf", ukernels = "none"}>
// CHECK: util.global private @__device_0
util.func public @f(%x: tensor<64x64xf32>) -> tensor<64x64xf32, #left> {
  // CHECK: flow.tensor.encode
  %packed = flow.tensor.encode %x : tensor<64x64xf32> -> tensor<64x64xf32, #left>
  util.return %packed : tensor<64x64xf32, #left>
}
