// A chain from positions to a mask is one operation for each mask. The number of each draw stays outside of it.
// RUN: irongrad opt %s --pass draw-at-once

#one = affine_map<(d0, d1) -> (d0, d1)>
#scalar = affine_map<(d0, d1) -> ()>

// CHECK: util.func public @f([[X:%.+]]: tensor<4x8xf32>, [[KEY:%.+]]: tensor<i64>)
util.func public @f(%x: tensor<4x8xf32>, %key: tensor<i64>) -> (tensor<4x8xf32>, tensor<4x8xi1>) {
  %first = arith.constant dense<1> : tensor<i64>
  %multiplier = arith.constant 3528531795 : i64
  %bound = arith.constant 3865470566 : i64
  %zero = arith.constant 0.0 : f32
  // CHECK-NOT: linalg.index
  // CHECK: [[NUMBER:%.+]] = linalg.generic
  // CHECK-SAME: iterator_types = []
  // CHECK: arith.xori
  %room = tensor.empty() : tensor<i64>
  %number = linalg.generic {indexing_maps = [affine_map<() -> ()>, affine_map<() -> ()>, affine_map<() -> ()>],
      iterator_types = []} ins(%key, %first : tensor<i64>, tensor<i64>) outs(%room : tensor<i64>) {
  ^bb0(%a: i64, %b: i64, %out: i64):
    %0 = arith.xori %a, %b : i64
    linalg.yield %0 : i64
  } -> tensor<i64>
  // CHECK: [[MASK:%.+]] = linalg.generic
  // CHECK-SAME: ins([[NUMBER]] : tensor<i64>)
  // CHECK: linalg.index 0
  // CHECK: linalg.index 1
  // CHECK: arith.muli
  // CHECK: arith.addi
  // CHECK: arith.index_cast
  // CHECK: arith.muli
  // CHECK: arith.xori
  // CHECK: arith.cmpi
  %flat = tensor.empty() : tensor<32xi64>
  %places = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]}
      outs(%flat : tensor<32xi64>) {
  ^bb0(%out: i64):
    %0 = linalg.index 0 : index
    %1 = arith.index_cast %0 : index to i64
    linalg.yield %1 : i64
  } -> tensor<32xi64>
  %expanded = tensor.expand_shape %places [[0, 1]] output_shape [4, 8] : tensor<32xi64> into tensor<4x8xi64>
  %words = tensor.empty() : tensor<4x8xi64>
  %multiplied = linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel", "parallel"]}
      ins(%expanded : tensor<4x8xi64>) outs(%words : tensor<4x8xi64>) {
  ^bb0(%a: i64, %out: i64):
    %0 = arith.muli %a, %multiplier : i64
    linalg.yield %0 : i64
  } -> tensor<4x8xi64>
  %mixed = linalg.generic {indexing_maps = [#one, #scalar, #one], iterator_types = ["parallel", "parallel"]}
      ins(%multiplied, %number : tensor<4x8xi64>, tensor<i64>) outs(%words : tensor<4x8xi64>) {
  ^bb0(%a: i64, %b: i64, %out: i64):
    %0 = arith.xori %a, %b : i64
    linalg.yield %0 : i64
  } -> tensor<4x8xi64>
  %bits = tensor.empty() : tensor<4x8xi1>
  %mask = linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel", "parallel"]}
      ins(%mixed : tensor<4x8xi64>) outs(%bits : tensor<4x8xi1>) {
  ^bb0(%a: i64, %out: i1):
    %0 = arith.cmpi slt, %a, %bound : i64
    linalg.yield %0 : i1
  } -> tensor<4x8xi1>
  // CHECK: linalg.generic
  // CHECK-SAME: ins([[X]], [[MASK]] : tensor<4x8xf32>, tensor<4x8xi1>)
  // CHECK-NOT: arith.muli
  %values = tensor.empty() : tensor<4x8xf32>
  %y = linalg.generic {indexing_maps = [#one, #one, #one], iterator_types = ["parallel", "parallel"]}
      ins(%x, %mask : tensor<4x8xf32>, tensor<4x8xi1>) outs(%values : tensor<4x8xf32>) {
  ^bb0(%a: f32, %b: i1, %out: f32):
    %0 = arith.select %b, %a, %zero : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  util.return %y, %mask : tensor<4x8xf32>, tensor<4x8xi1>
}
