// A loop whose rows never meet is one kernel.
// RUN: irongrad opt %s --pass loop-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#order = affine_map<(d0, d1) -> (d0, d1)>

// CHECK: util.func public @f([[W:%.+]]: tensor<32x32xf32>, [[H:%.+]]: tensor<6x32xf32>, [[ROWS:%.+]]: tensor<9x6x32xf32>)
util.func public @f(%w: tensor<32x32xf32>, %h0: tensor<6x32xf32>, %rows: tensor<9x6x32xf32>)
    -> (tensor<6x32xf32>, tensor<9x6x32xf32>) {
  %first = arith.constant 0 : index
  %trips = arith.constant 9 : index
  %step = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<6x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<6x32xf32>) -> tensor<6x32xf32>
  %stack = tensor.empty() : tensor<9x6x32xf32>
  // CHECK-NOT: scf.for
  // CHECK: [[END:%.+]]:3 = flow.dispatch @{{.+}}([[H]], [[ROWS]], [[W]])
  // CHECK: util.return [[END]]#0, [[END]]#1
  %end:2 = scf.for %t = %first to %trips step %step iter_args(%h = %h0, %s = %stack)
      -> (tensor<6x32xf32>, tensor<9x6x32xf32>) {
    %row = tensor.extract_slice %rows[%t, 0, 0] [1, 6, 32] [1, 1, 1] : tensor<9x6x32xf32> to tensor<6x32xf32>
    %product = linalg.matmul ins(%h, %w : tensor<6x32xf32>, tensor<32x32xf32>) outs(%zeros : tensor<6x32xf32>)
        -> tensor<6x32xf32>
    %new = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel", "parallel"]}
        ins(%product, %row : tensor<6x32xf32>, tensor<6x32xf32>) outs(%empty : tensor<6x32xf32>) {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      linalg.yield %x : f32
    } -> tensor<6x32xf32>
    %next = tensor.insert_slice %new into %s[%t, 0, 0] [1, 6, 32] [1, 1, 1]
        : tensor<6x32xf32> into tensor<9x6x32xf32>
    scf.yield %new, %next : tensor<6x32xf32>, tensor<9x6x32xf32>
  }
  util.return %end#0, %end#1 : tensor<6x32xf32>, tensor<9x6x32xf32>
}
