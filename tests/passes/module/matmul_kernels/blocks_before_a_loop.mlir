// An operand that stays the same in a loop is copied into blocks before the loop.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#result = affine_map<(m, n, k) -> (m, n)>

// CHECK: util.func public @f([[W:%.+]]: tensor<128x128xf32>, [[X:%.+]]: tensor<128x128xf32>)
util.func public @f(%w: tensor<128x128xf32>, %x: tensor<128x128xf32>) -> tensor<128x128xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x128xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x128xf32>) -> tensor<128x128xf32>
  // CHECK: [[PIECES:%.+]] = tensor.expand_shape [[W]]
  // CHECK: [[BLOCKS:%.+]] = linalg.generic {{.+}} ins([[PIECES]] : {{.+}})
  // CHECK: scf.for {{.+}} iter_args([[STATE:%[^ ]+]] = [[X]])
  %end = scf.for %i = %first to %last step %one iter_args(%state = %x) -> tensor<128x128xf32> {
    // CHECK-NEXT: [[NEXT:%.+]] = flow.dispatch {{.+}}([[STATE]], [[BLOCKS]])
    // CHECK-NEXT: scf.yield [[NEXT]]
    %next = linalg.matmul indexing_maps = [#left, #right, #result]
        ins(%state, %w : tensor<128x128xf32>, tensor<128x128xf32>)
        outs(%zeros : tensor<128x128xf32>) -> tensor<128x128xf32>
    scf.yield %next : tensor<128x128xf32>
  }
  util.return %end : tensor<128x128xf32>
}
