// The number of matrices may be known at run time alone; the launch gives it.
// RUN: irongrad opt %s --pass attention-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable private @attention_0_Dx32x48
// CHECK: func.func @attention_0_Dx32x48({{.*}}: !stream.binding, {{.*}}: !stream.binding, {{.*}}: !stream.binding, {{.*}}: index, {{.*}}: !stream.binding)
// CHECK: util.func public @f([[Q:%.+]]: tensor<?x32x16xf32>, [[K:%.+]]: tensor<?x16x48xf32>, [[V:%.+]]: tensor<?x48x16xf32>, [[B:%.+]]: index)
// CHECK-NOT: tensor<?x32x48xf32>
util.func public @f(%q: tensor<?x32x16xf32>, %k: tensor<?x16x48xf32>, %v: tensor<?x48x16xf32>, %b: index) -> tensor<?x32x16xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%b) : tensor<?x32x48xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x32x48xf32>) -> tensor<?x32x48xf32>
  %scores = linalg.batch_matmul ins(%q, %k : tensor<?x32x16xf32>, tensor<?x16x48xf32>)
      outs(%zeros : tensor<?x32x48xf32>) -> tensor<?x32x48xf32>
  %weights = linalg.softmax dimension(2) ins(%scores : tensor<?x32x48xf32>) outs(%empty : tensor<?x32x48xf32>)
      -> tensor<?x32x48xf32>
  %room = tensor.empty(%b) : tensor<?x32x16xf32>
  %none = linalg.fill ins(%zero : f32) outs(%room : tensor<?x32x16xf32>) -> tensor<?x32x16xf32>
  // CHECK: [[R:%.+]] = flow.dispatch @attention_0_Dx32x48::@attention_0_Dx32x48[[[N:%.+]]]([[Q]], [[K]], [[V]], [[N]])
  // CHECK: util.return [[R]]
  %result = linalg.batch_matmul ins(%weights, %v : tensor<?x32x48xf32>, tensor<?x48x16xf32>)
      outs(%none : tensor<?x32x16xf32>) -> tensor<?x32x16xf32>
  util.return %result : tensor<?x32x16xf32>
}

// Any other size that is unknown leaves the scores to IREE.
// CHECK: util.func public @g
// CHECK: linalg.softmax
util.func public @g(%q: tensor<4x?x16xf32>, %k: tensor<4x16x48xf32>, %v: tensor<4x48x16xf32>, %r: index) -> tensor<4x?x16xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%r) : tensor<4x?x48xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x?x48xf32>) -> tensor<4x?x48xf32>
  %scores = linalg.batch_matmul ins(%q, %k : tensor<4x?x16xf32>, tensor<4x16x48xf32>)
      outs(%zeros : tensor<4x?x48xf32>) -> tensor<4x?x48xf32>
  %weights = linalg.softmax dimension(2) ins(%scores : tensor<4x?x48xf32>) outs(%empty : tensor<4x?x48xf32>)
      -> tensor<4x?x48xf32>
  %room = tensor.empty(%r) : tensor<4x?x16xf32>
  %none = linalg.fill ins(%zero : f32) outs(%room : tensor<4x?x16xf32>) -> tensor<4x?x16xf32>
  %result = linalg.batch_matmul ins(%weights, %v : tensor<4x?x48xf32>, tensor<4x48x16xf32>)
      outs(%none : tensor<4x?x16xf32>) -> tensor<4x?x16xf32>
  util.return %result : tensor<4x?x16xf32>
}
