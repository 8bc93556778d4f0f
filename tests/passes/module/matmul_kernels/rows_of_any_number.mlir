// A product of any number of rows has a kernel, which a launch gives that number.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

// CHECK: stream.executable.export public @[[KERNEL:product_0_1xDx96x128]] workgroups(%[[ROWS:.*]]: index)
// CHECK: affine.apply
// CHECK: func.func @[[KERNEL]](%{{.*}}: !stream.binding, %{{.*}}: !stream.binding, %{{.*}}: index, %{{.*}}: !stream.binding)

// CHECK-LABEL: @rows
util.func public @rows(%a: tensor<?x128xf32>, %b: tensor<128x96xf32>, %rows: index) -> tensor<?x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%rows) : tensor<?x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x96xf32>) -> tensor<?x96xf32>
  // CHECK: %[[COUNT:.*]] = tensor.dim %arg0
  // CHECK: flow.dispatch @[[KERNEL]]::@[[KERNEL]][%[[COUNT]]](%arg0, %arg1, %[[COUNT]])
  %c = linalg.matmul ins(%a, %b : tensor<?x128xf32>, tensor<128x96xf32>)
      outs(%zeros : tensor<?x96xf32>) -> tensor<?x96xf32>
  util.return %c : tensor<?x96xf32>
}

// CHECK-LABEL: @rows_in_a_batch
util.func public @rows_in_a_batch(%a: tensor<8x?x128xf32>, %b: tensor<8x128x96xf32>, %rows: index)
    -> tensor<8x?x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%rows) : tensor<8x?x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<8x?x96xf32>) -> tensor<8x?x96xf32>
  // CHECK: %[[COUNT:.*]] = tensor.dim %arg0
  // CHECK: flow.dispatch @product_1_8xDx96x128::@product_1_8xDx96x128[%[[COUNT]]](%arg0, %arg1, %[[COUNT]])
  %c = linalg.batch_matmul ins(%a, %b : tensor<8x?x128xf32>, tensor<8x128x96xf32>)
      outs(%zeros : tensor<8x?x96xf32>) -> tensor<8x?x96xf32>
  util.return %c : tensor<8x?x96xf32>
}
