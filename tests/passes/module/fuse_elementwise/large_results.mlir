// Operations with several readers stay apart if their results are large.
// RUN: irongrad opt %s --pass fuse-elementwise
// UNCHANGED

#order = affine_map<(d0) -> (d0)>

// CHECK: util.func public @f([[X:%.+]]: tensor<65536xf32>)
util.func public @f(%x: tensor<65536xf32>) -> (tensor<65536xf32>, tensor<65536xf32>) {
  %empty = tensor.empty() : tensor<65536xf32>
  // CHECK: [[A:%.+]] = linalg.generic
  // CHECK-SAME: ins([[X]] : tensor<65536xf32>)
  // CHECK: [[B:%.+]] = linalg.generic
  // CHECK-SAME: ins([[A]] : tensor<65536xf32>)
  // CHECK-NOT: util.optimization_barrier
  // CHECK: util.return [[A]], [[B]]
  %a = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%x : tensor<65536xf32>) outs(%empty : tensor<65536xf32>) {
  ^bb0(%one: f32, %out: f32):
    %sum = arith.addf %one, %one : f32
    linalg.yield %sum : f32
  } -> tensor<65536xf32>
  %b = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%a : tensor<65536xf32>) outs(%empty : tensor<65536xf32>) {
  ^bb0(%one: f32, %out: f32):
    %tanh = math.tanh %one : f32
    linalg.yield %tanh : f32
  } -> tensor<65536xf32>
  util.return %a, %b : tensor<65536xf32>, tensor<65536xf32>
}
