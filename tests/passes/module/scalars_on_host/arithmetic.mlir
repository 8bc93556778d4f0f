// Arithmetic on float64 tensors of rank 0 becomes arithmetic on scalars. The result becomes a tensor again.
// RUN: irongrad opt %s --pass scalars-on-host

#scalar = affine_map<() -> ()>

// CHECK-LABEL: func.func @decay
// CHECK-SAME: ([[RATE:%.+]]: tensor<f64>) -> tensor<f64>
func.func @decay(%rate: tensor<f64>) -> tensor<f64> {
  // CHECK: [[ONE:%.+]] = arith.constant 1.000000e+00 : f64
  %one = arith.constant 1.0 : f64
  %empty = tensor.empty() : tensor<f64>
  // CHECK: [[X:%.+]] = tensor.extract [[RATE]][] : tensor<f64>
  // CHECK-NEXT: [[POWER:%.+]] = math.powf [[X]], [[X]] : f64
  // CHECK-NEXT: [[DECAY:%.+]] = arith.subf [[ONE]], [[POWER]] : f64
  // CHECK-NEXT: [[RESULT:%.+]] = tensor.from_elements [[DECAY]] : tensor<f64>
  // CHECK-NOT: linalg.generic
  %decay = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%rate : tensor<f64>) outs(%empty : tensor<f64>) {
  ^bb0(%in: f64, %out: f64):
    %power = math.powf %in, %in : f64
    %less = arith.subf %one, %power : f64
    linalg.yield %less : f64
  } -> tensor<f64>
  // CHECK: return [[RESULT]] : tensor<f64>
  return %decay : tensor<f64>
}
