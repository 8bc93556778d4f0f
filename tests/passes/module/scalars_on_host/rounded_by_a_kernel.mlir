// A kernel only rounds a float64 scalar to float32. It gets the rounded scalar, and has no float64 left.
// RUN: irongrad opt %s --pass scalars-on-host

#none = affine_map<(d0) -> ()>
#row = affine_map<(d0) -> (d0)>

// CHECK-LABEL: func.func @scaled
// CHECK-SAME: ([[X:%.+]]: tensor<4xf32>, [[RATE:%.+]]: tensor<f64>)
func.func @scaled(%x: tensor<4xf32>, %rate: tensor<f64>) -> tensor<4xf32> {
  %tenth = arith.constant 0.1 : f64
  %empty = tensor.empty() : tensor<4xf32>
  // CHECK: [[WIDE:%.+]] = tensor.extract [[RATE]][] : tensor<f64>
  // CHECK-NEXT: [[ROUNDED:%.+]] = call @float32_of([[WIDE]]) : (f64) -> f32
  // CHECK-NEXT: [[NARROW:%.+]] = flow.tensor.splat [[ROUNDED]] : tensor<f32>
  // CHECK: linalg.generic
  // CHECK-SAME: ins([[X]], [[NARROW]] : tensor<4xf32>, tensor<f32>)
  // CHECK-NOT: f64
  // CHECK: ([[IN:%.+]]: f32, [[BY:%.+]]: f32, {{.+}}: f32):
  // CHECK-NEXT: [[TENTH:%.+]] = arith.constant 1.000000e-01 : f32
  // CHECK-NEXT: [[PRODUCT:%.+]] = arith.mulf [[IN]], [[BY]] : f32
  // CHECK-NEXT: arith.addf [[PRODUCT]], [[TENTH]] : f32
  // CHECK-NOT: f64
  // CHECK: return
  // CHECK: func.func private @float32_of(%{{.+}}: f64) -> f32
  %y = linalg.generic {indexing_maps = [#row, #none, #row], iterator_types = ["parallel"]}
      ins(%x, %rate : tensor<4xf32>, tensor<f64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %by: f64, %out: f32):
    %narrow = arith.truncf %by : f64 to f32
    %constant = arith.truncf %tenth : f64 to f32
    %product = arith.mulf %in, %narrow : f32
    %sum = arith.addf %product, %constant : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}
