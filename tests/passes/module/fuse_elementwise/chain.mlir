// Elementwise operations with several readers become one operation with several results.
// RUN: irongrad opt %s --pass fuse-elementwise

#order = affine_map<(d0) -> (d0)>

// CHECK: util.func public @f([[X:%.+]]: tensor<64xf32>, [[Y:%.+]]: tensor<64xf32>)
util.func public @f(%x: tensor<64xf32>, %y: tensor<64xf32>) -> (tensor<64xf32>, tensor<64xf32>, tensor<64xf32>) {
  %empty = tensor.empty() : tensor<64xf32>
  // CHECK: [[ALL:%.+]]:3 = linalg.generic
  // CHECK-SAME: ins([[X]], [[Y]] : tensor<64xf32>, tensor<64xf32>)
  // CHECK: [[SUM:%.+]] = arith.addf
  // CHECK-NEXT: math.tanh [[SUM]]
  // CHECK: arith.mulf
  // CHECK-NOT: linalg.generic
  // CHECK: util.return [[ALL]]#{{.}}, [[ALL]]#{{.}}, [[ALL]]#{{.}}
  %a = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel"]}
      ins(%x, %y : tensor<64xf32>, tensor<64xf32>) outs(%empty : tensor<64xf32>) {
  ^bb0(%one: f32, %other: f32, %out: f32):
    %sum = arith.addf %one, %other : f32
    linalg.yield %sum : f32
  } -> tensor<64xf32>
  %b = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%a : tensor<64xf32>) outs(%empty : tensor<64xf32>) {
  ^bb0(%one: f32, %out: f32):
    %tanh = math.tanh %one : f32
    linalg.yield %tanh : f32
  } -> tensor<64xf32>
  %c = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel"]}
      ins(%a, %b : tensor<64xf32>, tensor<64xf32>) outs(%empty : tensor<64xf32>) {
  ^bb0(%one: f32, %other: f32, %out: f32):
    %product = arith.mulf %one, %other : f32
    linalg.yield %product : f32
  } -> tensor<64xf32>
  util.return %a, %b, %c : tensor<64xf32>, tensor<64xf32>, tensor<64xf32>
}
