// Code without float64 stays as it is, also on scalars.
// RUN: irongrad opt %s --pass scalars-on-host

#scalar = affine_map<() -> ()>

// CHECK-LABEL: func.func @doubled
// CHECK-SAME: ([[X:%.+]]: tensor<f32>)
func.func @doubled(%x: tensor<f32>) -> tensor<f32> {
  // CHECK-NEXT: [[EMPTY:%.+]] = tensor.empty() : tensor<f32>
  %empty = tensor.empty() : tensor<f32>
  // CHECK-NEXT: [[Y:%.+]] = linalg.generic
  // CHECK-SAME: ins([[X]] : tensor<f32>) outs([[EMPTY]] : tensor<f32>)
  // CHECK-NEXT: ([[IN:%.+]]: f32, {{.+}}: f32):
  // CHECK-NEXT: [[SUM:%.+]] = arith.addf [[IN]], [[IN]] : f32
  // CHECK-NEXT: linalg.yield [[SUM]] : f32
  // CHECK-NEXT: } -> tensor<f32>
  // CHECK-NEXT: return [[Y]] : tensor<f32>
  %y = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%x : tensor<f32>) outs(%empty : tensor<f32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %in : f32
    linalg.yield %sum : f32
  } -> tensor<f32>
  return %y : tensor<f32>
}
