// A comparison with a constant that float32 holds exactly becomes a comparison in float32.
// RUN: irongrad opt %s --pass scalars-on-host

#row = affine_map<(d0) -> (d0)>

// CHECK-LABEL: func.func @positive
func.func @positive(%x: tensor<4xf32>) -> tensor<4xi1> {
  %zero = arith.constant 0.0 : f64
  %empty = tensor.empty() : tensor<4xi1>
  // CHECK: ([[IN:%.+]]: f32, {{.+}}: i1):
  // CHECK-NEXT: arith.extf [[IN]] : f32 to f64
  // CHECK-NEXT: [[ZERO:%.+]] = arith.constant 0.000000e+00 : f32
  // CHECK-NEXT: [[GREATER:%.+]] = arith.cmpf ogt, [[IN]], [[ZERO]] : f32
  // CHECK-NEXT: linalg.yield [[GREATER]] : i1
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xi1>) {
  ^bb0(%in: f32, %out: i1):
    %wide = arith.extf %in : f32 to f64
    %greater = arith.cmpf ogt, %wide, %zero : f64
    linalg.yield %greater : i1
  } -> tensor<4xi1>
  return %y : tensor<4xi1>
}
