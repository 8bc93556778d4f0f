// A kernel adds the bias, a row that is added to every row of its product.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#order = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d1)>

// CHECK: util.func public @f([[A:%.+]]: {{.+}}, [[B:%.+]]: {{.+}}, [[BIAS:%.+]]: tensor<96xf32>)
util.func public @f(%a: tensor<128x128xf32>, %b: tensor<128x96xf32>, %bias: tensor<96xf32>) -> tensor<128x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x96xf32>)
      outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  // CHECK: [[SUM:%.+]] = flow.dispatch @{{.+}}([[A]], [[B]], [[BIAS]])
  // CHECK-NOT: linalg.generic
  // CHECK: util.return [[SUM]]
  %sum = linalg.generic {indexing_maps = [#order, #row, #order], iterator_types = ["parallel", "parallel"]}
      ins(%c, %bias : tensor<128x96xf32>, tensor<96xf32>) outs(%empty : tensor<128x96xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %added = arith.addf %x, %y : f32
    linalg.yield %added : f32
  } -> tensor<128x96xf32>
  util.return %sum : tensor<128x96xf32>
}
