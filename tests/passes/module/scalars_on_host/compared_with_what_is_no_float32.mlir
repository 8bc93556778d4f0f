// A comparison stays in float64 if float32 would round the constant.
// RUN: irongrad opt %s --pass scalars-on-host

#row = affine_map<(d0) -> (d0)>

// CHECK-LABEL: func.func @large
func.func @large(%x: tensor<4xf32>) -> tensor<4xi1> {
  // CHECK: [[TENTH:%.+]] = arith.constant 1.000000e-01 : f64
  %tenth = arith.constant 0.1 : f64
  %empty = tensor.empty() : tensor<4xi1>
  // CHECK: [[WIDE:%.+]] = arith.extf
  // CHECK-NEXT: [[GREATER:%.+]] = arith.cmpf ogt, [[WIDE]], [[TENTH]] : f64
  // CHECK-NEXT: linalg.yield [[GREATER]] : i1
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xi1>) {
  ^bb0(%in: f32, %out: i1):
    %wide = arith.extf %in : f32 to f64
    %greater = arith.cmpf ogt, %wide, %tenth : f64
    linalg.yield %greater : i1
  } -> tensor<4xi1>
  return %y : tensor<4xi1>
}
