// Left alone: positions by themselves, integers that a tensor is read for, and a result of one operation.
// RUN: irongrad opt %s --pass draw-at-once

#one = affine_map<(d0) -> (d0)>

// CHECK: util.func public @f([[X:%.+]]: tensor<8xi64>)
util.func public @f(%x: tensor<8xi64>) -> (tensor<8xi64>, tensor<8xi64>) {
  %room = tensor.empty() : tensor<8xi64>
  // CHECK: [[PLACES:%.+]] = linalg.generic
  // CHECK: linalg.index 0
  %places = linalg.generic {indexing_maps = [#one], iterator_types = ["parallel"]} outs(%room : tensor<8xi64>) {
  ^bb0(%out: i64):
    %0 = linalg.index 0 : index
    %1 = arith.index_cast %0 : index to i64
    linalg.yield %1 : i64
  } -> tensor<8xi64>
  // CHECK: linalg.generic
  // CHECK-SAME: ins([[PLACES]], [[X]] : tensor<8xi64>, tensor<8xi64>)
  %sum = linalg.generic {indexing_maps = [#one, #one, #one], iterator_types = ["parallel"]}
      ins(%places, %x : tensor<8xi64>, tensor<8xi64>) outs(%room : tensor<8xi64>) {
  ^bb0(%a: i64, %b: i64, %out: i64):
    %0 = arith.addi %a, %b : i64
    linalg.yield %0 : i64
  } -> tensor<8xi64>
  util.return %sum, %places : tensor<8xi64>, tensor<8xi64>
}
