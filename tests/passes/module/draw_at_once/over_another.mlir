// A result on the way to another one: each is computed from the positions.
// RUN: irongrad opt %s --pass draw-at-once

#one = affine_map<(d0) -> (d0)>

// CHECK: util.func public @f
util.func public @f() -> (tensor<8xi64>, tensor<8xi1>) {
  %multiplier = arith.constant 3528531795 : i64
  %bound = arith.constant 3865470566 : i64
  %room = tensor.empty() : tensor<8xi64>
  // CHECK: [[WORDS:%.+]] = linalg.generic
  // CHECK-SAME: outs
  // CHECK: linalg.index 0
  // CHECK: arith.muli
  // CHECK: [[MASK:%.+]] = linalg.generic
  // CHECK: linalg.index 0
  // CHECK: arith.muli
  // CHECK: arith.cmpi
  // CHECK-NOT: linalg.generic
  // CHECK: util.return [[WORDS]], [[MASK]]
  %places = linalg.generic {indexing_maps = [#one], iterator_types = ["parallel"]} outs(%room : tensor<8xi64>) {
  ^bb0(%out: i64):
    %0 = linalg.index 0 : index
    %1 = arith.index_cast %0 : index to i64
    linalg.yield %1 : i64
  } -> tensor<8xi64>
  %words = linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel"]}
      ins(%places : tensor<8xi64>) outs(%room : tensor<8xi64>) {
  ^bb0(%a: i64, %out: i64):
    %0 = arith.muli %a, %multiplier : i64
    linalg.yield %0 : i64
  } -> tensor<8xi64>
  %bits = tensor.empty() : tensor<8xi1>
  %mask = linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel"]}
      ins(%words : tensor<8xi64>) outs(%bits : tensor<8xi1>) {
  ^bb0(%a: i64, %out: i1):
    %0 = arith.cmpi slt, %a, %bound : i64
    linalg.yield %0 : i1
  } -> tensor<8xi1>
  util.return %words, %mask : tensor<8xi64>, tensor<8xi1>
}
