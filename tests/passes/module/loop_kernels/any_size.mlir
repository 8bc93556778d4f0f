// A loop over any number of steps and rows is one kernel, but not if a slice may leave rows out.
// RUN: irongrad opt %s --pass loop-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#order = affine_map<(d0, d1) -> (d0, d1)>

// CHECK: util.func public @whole([[W:%.+]]: tensor<32x32xf32>, [[H:%.+]]: tensor<?x32xf32>, [[ROWS:%.+]]: tensor<?x?x32xf32>,
// CHECK-SAME: [[TRIPS:%.+]]: index, [[BATCH:%.+]]: index)
util.func public @whole(%w: tensor<32x32xf32>, %h0: tensor<?x32xf32>, %rows: tensor<?x?x32xf32>, %trips: index,
    %batch: index) -> (tensor<?x32xf32>, tensor<?x?x32xf32>) {
  %first = arith.constant 0 : index
  %one = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %h1 = flow.tensor.tie_shape %h0 : tensor<?x32xf32>{%batch}
  %stack = tensor.empty(%trips, %batch) : tensor<?x?x32xf32>
  // CHECK-NOT: scf.for
  // CHECK: [[END:%.+]]:3 = flow.dispatch @{{.+}}[[[TRIPS]], [[BATCH]]]({{.+}}, [[ROWS]], [[W]], [[TRIPS]], [[BATCH]])
  // CHECK: util.return [[END]]#0, [[END]]#1
  %end:2 = scf.for %t = %first to %trips step %one iter_args(%h = %h1, %s = %stack)
      -> (tensor<?x32xf32>, tensor<?x?x32xf32>) {
    %size = tensor.dim %h, %first : tensor<?x32xf32>
    %last = arith.subi %trips, %one : index
    %back = arith.subi %last, %t : index
    %empty = tensor.empty(%size) : tensor<?x32xf32>
    %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x32xf32>) -> tensor<?x32xf32>
    %row = tensor.extract_slice %rows[%back, 0, 0] [1, %size, 32] [1, 1, 1]
        : tensor<?x?x32xf32> to tensor<?x32xf32>
    %product = linalg.matmul ins(%h, %w : tensor<?x32xf32>, tensor<32x32xf32>) outs(%zeros : tensor<?x32xf32>)
        -> tensor<?x32xf32>
    %new = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel", "parallel"]}
        ins(%product, %row : tensor<?x32xf32>, tensor<?x32xf32>) outs(%empty : tensor<?x32xf32>) {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      linalg.yield %x : f32
    } -> tensor<?x32xf32>
    %next = tensor.insert_slice %new into %s[%t, 0, 0] [1, %batch, 32] [1, 1, 1]
        : tensor<?x32xf32> into tensor<?x?x32xf32>
    scf.yield %new, %next : tensor<?x32xf32>, tensor<?x?x32xf32>
  }
  util.return %end#0, %end#1 : tensor<?x32xf32>, tensor<?x?x32xf32>
}

// CHECK-LABEL: @some_rows
// CHECK: scf.for
util.func public @some_rows(%w: tensor<32x32xf32>, %h0: tensor<?x32xf32>, %rows: tensor<?x?x32xf32>, %trips: index,
    %batch: index, %fewer: index) -> tensor<?x32xf32> {
  %first = arith.constant 0 : index
  %one = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %h1 = flow.tensor.tie_shape %h0 : tensor<?x32xf32>{%batch}
  %empty = tensor.empty(%batch) : tensor<?x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x32xf32>) -> tensor<?x32xf32>
  %end = scf.for %t = %first to %trips step %one iter_args(%h = %h1) -> (tensor<?x32xf32>) {
    %row = tensor.extract_slice %rows[%t, 0, 0] [1, %fewer, 32] [1, 1, 1] : tensor<?x?x32xf32> to tensor<?x32xf32>
    %product = linalg.matmul ins(%h, %w : tensor<?x32xf32>, tensor<32x32xf32>) outs(%zeros : tensor<?x32xf32>)
        -> tensor<?x32xf32>
    %new = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel", "parallel"]}
        ins(%product, %row : tensor<?x32xf32>, tensor<?x32xf32>) outs(%empty : tensor<?x32xf32>) {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      linalg.yield %x : f32
    } -> tensor<?x32xf32>
    scf.yield %new : tensor<?x32xf32>
  }
  util.return %end : tensor<?x32xf32>
}
