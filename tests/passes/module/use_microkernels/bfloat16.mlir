// Products of bfloat16 use microkernels on a CPU with bfloat16 instructions, which only the microkernels use.
// RUN: irongrad opt %s --pass use-microkernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx512f,+avx512bf16",
     target_triple = "x86_64-unknown-unknown-eabi-elf", ukernels = "none"}>]> : !hal.device
#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [bf16, bf16, f32]>

// CHECK-NOT: ukernels
// CHECK: target_triple = "x86_64-unknown-unknown-eabi-elf"}>
// CHECK-NOT: ukernels
// CHECK: util.global private @__device_0
util.func public @f(%x: tensor<64x64xbf16>) -> tensor<64x64xbf16, #left> {
  // CHECK: flow.tensor.encode
  %packed = flow.tensor.encode %x : tensor<64x64xbf16> -> tensor<64x64xbf16, #left>
  util.return %packed : tensor<64x64xbf16, #left>
}
