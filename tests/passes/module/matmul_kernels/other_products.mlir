// IREE compiles products that are small, not float32, with two sizes or columns known at run time alone, and those whose
// sums do not begin at zero.
// RUN: irongrad opt %s --pass matmul-kernels
// UNCHANGED

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

util.func public @small(%a: tensor<4x1024xf32>, %b: tensor<1024x96xf32>) -> tensor<4x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x96xf32>) -> tensor<4x96xf32>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<4x1024xf32>, tensor<1024x96xf32>)
      outs(%zeros : tensor<4x96xf32>) -> tensor<4x96xf32>
  util.return %c : tensor<4x96xf32>
}
util.func public @float64(%a: tensor<128x128xf64>, %b: tensor<128x96xf64>) -> tensor<128x96xf64> {
  %zero = arith.constant 0.0 : f64
  %empty = tensor.empty() : tensor<128x96xf64>
  %zeros = linalg.fill ins(%zero : f64) outs(%empty : tensor<128x96xf64>) -> tensor<128x96xf64>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf64>, tensor<128x96xf64>)
      outs(%zeros : tensor<128x96xf64>) -> tensor<128x96xf64>
  util.return %c : tensor<128x96xf64>
}
util.func public @columns(%a: tensor<128x128xf32>, %b: tensor<128x?xf32>, %columns: index) -> tensor<128x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%columns) : tensor<128x?xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x?xf32>) -> tensor<128x?xf32>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x?xf32>)
      outs(%zeros : tensor<128x?xf32>) -> tensor<128x?xf32>
  util.return %c : tensor<128x?xf32>
}
util.func public @rows_and_summands(%a: tensor<?x?xf32>, %b: tensor<?x96xf32>, %rows: index) -> tensor<?x96xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%rows) : tensor<?x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x96xf32>) -> tensor<?x96xf32>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<?x?xf32>, tensor<?x96xf32>)
      outs(%zeros : tensor<?x96xf32>) -> tensor<?x96xf32>
  util.return %c : tensor<?x96xf32>
}
util.func public @added(%a: tensor<128x128xf32>, %b: tensor<128x96xf32>, %to: tensor<128x96xf32>)
    -> tensor<128x96xf32> {
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x96xf32>)
      outs(%to : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
util.func public @beginning_with_one(%a: tensor<128x128xf32>, %b: tensor<128x96xf32>) -> tensor<128x96xf32> {
  %one = arith.constant 1.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %ones = linalg.fill ins(%one : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  // CHECK: linalg.matmul
  %c = linalg.matmul ins(%a, %b : tensor<128x128xf32>, tensor<128x96xf32>)
      outs(%ones : tensor<128x96xf32>) -> tensor<128x96xf32>
  util.return %c : tensor<128x96xf32>
}
