// A softmax between two products is one kernel; nothing writes the scores.
// RUN: irongrad opt %s --pass attention-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @attention_0_4x32x48
// CHECK: util.func public @f([[Q:%.+]]: tensor<4x32x16xf32>, [[K:%.+]]: tensor<4x16x48xf32>, [[V:%.+]]: tensor<4x48x16xf32>)
// CHECK-NOT: tensor<4x32x48xf32>
util.func public @f(%q: tensor<4x32x16xf32>, %k: tensor<4x16x48xf32>, %v: tensor<4x48x16xf32>) -> tensor<4x32x16xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x32x48xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x32x48xf32>) -> tensor<4x32x48xf32>
  %scores = linalg.batch_matmul ins(%q, %k : tensor<4x32x16xf32>, tensor<4x16x48xf32>)
      outs(%zeros : tensor<4x32x48xf32>) -> tensor<4x32x48xf32>
  %weights = linalg.softmax dimension(2) ins(%scores : tensor<4x32x48xf32>) outs(%empty : tensor<4x32x48xf32>)
      -> tensor<4x32x48xf32>
  %room = tensor.empty() : tensor<4x32x16xf32>
  %none = linalg.fill ins(%zero : f32) outs(%room : tensor<4x32x16xf32>) -> tensor<4x32x16xf32>
  // CHECK: [[R:%.+]] = flow.dispatch @attention_0_4x32x48::@attention_0_4x32x48([[Q]], [[K]], [[V]])
  // CHECK-NEXT: util.return [[R]]
  %result = linalg.batch_matmul ins(%weights, %v : tensor<4x32x48xf32>, tensor<4x48x16xf32>)
      outs(%none : tensor<4x32x16xf32>) -> tensor<4x32x16xf32>
  util.return %result : tensor<4x32x16xf32>
}
