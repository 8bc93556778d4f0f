// An operation that a reduction reads stays apart from its other readers. IREE fuses it with the reduction.
// RUN: irongrad opt %s --pass fuse-elementwise
// UNCHANGED

#order = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>

// CHECK: util.func public @f([[X:%.+]]: tensor<8x8xf32>, [[ZEROS:%.+]]: tensor<8xf32>)
util.func public @f(%x: tensor<8x8xf32>, %zeros: tensor<8xf32>) -> (tensor<8x8xf32>, tensor<8xf32>) {
  %empty = tensor.empty() : tensor<8x8xf32>
  // CHECK: [[A:%.+]] = linalg.generic
  // CHECK-SAME: ins([[X]] : tensor<8x8xf32>)
  // CHECK: [[B:%.+]] = linalg.generic
  // CHECK-SAME: ins([[A]] : tensor<8x8xf32>)
  // CHECK: [[SUMS:%.+]] = linalg.generic
  // CHECK-SAME: ins([[A]] : tensor<8x8xf32>) outs([[ZEROS]] : tensor<8xf32>)
  // CHECK-NOT: util.optimization_barrier
  // CHECK: util.return [[B]], [[SUMS]]
  %a = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xf32>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%one: f32, %out: f32):
    %sum = arith.addf %one, %one : f32
    linalg.yield %sum : f32
  } -> tensor<8x8xf32>
  %b = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<8x8xf32>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%one: f32, %out: f32):
    %tanh = math.tanh %one : f32
    linalg.yield %tanh : f32
  } -> tensor<8x8xf32>
  %sums = linalg.generic {indexing_maps = [#order, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<8x8xf32>) outs(%zeros : tensor<8xf32>) {
  ^bb0(%one: f32, %out: f32):
    %sum = arith.addf %one, %out : f32
    linalg.yield %sum : f32
  } -> tensor<8xf32>
  util.return %b, %sums : tensor<8x8xf32>, tensor<8xf32>
}
