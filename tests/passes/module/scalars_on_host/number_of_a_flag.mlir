// A boolean is converted to float64 by a select, because IREE's virtual machine would convert it to float32.
// RUN: irongrad opt %s --pass scalars-on-host

#scalar = affine_map<() -> ()>

// CHECK-LABEL: func.func @number
// CHECK-SAME: ([[FLAG:%.+]]: tensor<i1>)
func.func @number(%flag: tensor<i1>) -> tensor<f64> {
  %empty = tensor.empty() : tensor<f64>
  // CHECK: [[X:%.+]] = tensor.extract [[FLAG]][] : tensor<i1>
  // CHECK-NEXT: [[ONE:%.+]] = arith.constant 1.000000e+00 : f64
  // CHECK-NEXT: [[ZERO:%.+]] = arith.constant 0.000000e+00 : f64
  // CHECK-NEXT: [[NUMBER:%.+]] = arith.select [[X]], [[ONE]], [[ZERO]] : f64
  // CHECK-NEXT: tensor.from_elements [[NUMBER]] : tensor<f64>
  // CHECK-NOT: arith.uitofp
  %y = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%flag : tensor<i1>) outs(%empty : tensor<f64>) {
  ^bb0(%in: i1, %out: f64):
    %number = arith.uitofp %in : i1 to f64
    linalg.yield %number : f64
  } -> tensor<f64>
  return %y : tensor<f64>
}
